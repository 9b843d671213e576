/** The page put together: one form, one picture, one call at a time, and what came of each. */

import { Adapters } from "./adapters.js";
import { CallError, fetchBlob } from "./api.js";
import { Attachments } from "./attachments.js";
import { clearBanners, showError, showNotice } from "./banners.js";
import { perform } from "./calling.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { Downloads } from "./downloads.js";
import { History } from "./history.js";
import { Inspector } from "./inspector.js";
import { setUpIntake } from "./intake.js";
import { setUpKeyboard } from "./keyboard.js";
import { Marks } from "./marks.js";
import { emptyOutcome } from "./outcome.js";
import { Overlay } from "./overlay.js";
import { largestPictureBytes, pictureOf, shownBytes } from "./picture.js";
import { Progress, stepOf } from "./progress.js";
import { Results } from "./results.js";
import { connect } from "./server.js";
import { showSamples } from "./samples.js";
import { Settings } from "./settings.js";
import { callOf, namesOf } from "./skills.js";
import { setUpTheme } from "./theme.js";
import { setUpWebcam } from "./webcam.js";

const NOTHING_KNOWN = { max_body_bytes: 32 * 2 ** 20 };

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const oneColumn = matchMedia("(max-width: 960px)");

let picture = null;
let facts = NOTHING_KNOWN;
let running = null;

const overlay = new Overlay(byId("overlay"), { onHover: (id) => results.light(id) });
const results = new Results(overlay);
const inspector = new Inspector();
const conversation = new Conversation();
const downloads = new Downloads();
const progress = new Progress();
const settings = new Settings({ onChange: () => onFormChange(), onKey: () => askForAdapters() });
const adapters = new Adapters({ onChange: () => onFormChange() });
const attachments = new Attachments({ onFile: (file) => attach(file), onChange: () => onFormChange() });
const marks = new Marks({ overlay, onChange: () => onFormChange() });
const composer = new Composer({ onChange: () => onSkillOrForm() });
const history = new History({ onOpen: (entry) => reopen(entry), whyNot: (entry) => whyNotHere(entry) });

// ---------------------------------------------------------------------- the form

function form() {
  const { skill, text, length, reasoning, system } = composer;
  return {
    skill: skill.name,
    text,
    length,
    reasoning,
    system,
    picture,
    adapter: adapters.chosen,
    model: facts.model,
    defaults: facts.defaults,
    marks: skill.takesMarks ? marks.list : [],
    attached: attachments.list,
    turns: conversation.turns,
    settings: settings.values,
    streaming: settings.isStreaming,
  };
}

function onFormChange() {
  offerAttachments();
  inspector.setCall(callOf(form()), facts.needs_key || settings.key !== "");
  byId("key-wanted").hidden = !facts.needs_key || settings.key !== "";
}

function offerAttachments() {
  const used = conversation.turns.reduce((sum, { pictures = [] }) => sum + pictures.length, picture ? 1 : 0);
  const takesSeveral = composer.skill.name === "chat" && facts.max_chat_pictures > 1;
  attachments.offer(takesSeveral, facts.max_chat_pictures - used);
}

function newChat() {
  conversation.set([]);
  attachments.set([]);
}

let shownSkill = null;

/** Another skill starts with an empty result; other changes keep what is shown. */
function onSkillOrForm() {
  if (shownSkill !== composer.skill.name) {
    shownSkill = composer.skill.name;
    showIdle();
  }
  onFormChange();
}

function showIdle() {
  const isChat = composer.skill.name === "chat";
  results.clear(
    picture || !composer.skill.needsPicture
      ? "The answer appears here."
      : "Choose a picture first: then the answer appears here.",
  );
  inspector.setResponse(null);
  downloads.offer(null);
  marks.offer(Boolean(composer.skill.takesMarks && picture));
  byId("new-chat").hidden = !isChat || conversation.turns.length === 0;
  offerAttachments();
  conversation.isKept = isChat && facts.reads_pictures === false;
  conversation.show(isChat ? conversation.turns : []);
  byId("result").hidden = isChat;
}

// ---------------------------------------------------------------------- the picture

async function usePicture(blob, name, source = null) {
  try {
    const taken = await pictureOf(blob, name, { maxBytes: largestPictureBytes(facts), source });
    clearBanners();
    showPicture(taken);
    newChat();
    marks.set([]);
    showIdle();
    if (taken.shrunkFrom) showNotice(shrunkNotice(taken));
  } catch (error) {
    showError(error);
  }
  onFormChange();
}

function shrunkNotice({ width, height, blob, shrunkFrom }) {
  const before = `${shrunkFrom.width} × ${shrunkFrom.height}, ${shownBytes(shrunkFrom.bytes)}`;
  const after = `${width} × ${height}, ${shownBytes(blob.size)}`;
  return `The picture (${before}) is over this server's limit, so a smaller copy (${after}) is sent.`;
}

function showPicture(taken) {
  picture = taken;
  byId("empty").hidden = taken !== null;
  byId("canvas").hidden = byId("stage-tools").hidden = taken === null;
  for (const button of byId("samples").children) {
    button.setAttribute("aria-pressed", String(taken !== null && taken.source === button.dataset.source));
  }
  if (taken === null) return;
  byId("picture").src = taken.url;
  byId("picture").alt = `The picture: ${taken.name}`;
  byId("canvas").style.setProperty("--aspect", taken.width / taken.height);
  byId("picture-facts").textContent =
    `${taken.name} · ${taken.width} × ${taken.height} · ${shownBytes(taken.blob.size)}`;
  overlay.setPicture(taken.width, taken.height);
}

function removePicture() {
  if (isBusy()) return;
  showPicture(null);
  composer.suggest({});
  newChat();
  marks.set([]);
  showIdle();
  onFormChange();
}

async function useSample(sample, source) {
  if (isBusy()) return;
  try {
    const blob = await fetchBlob(source);
    composer.suggest(sample.ask);
    await usePicture(blob, sample.file, source);
  } catch (error) {
    showError(error);
  }
}

/** What is dropped or pasted on the form goes to the message, where a chat takes several and has its first. */
function useFile(file, target = null) {
  if (facts.reads_pictures === false) return showError(readsNoPictures());
  if (isBusy()) return;
  if (picture && attachments.isOffered && target?.closest("#composer")) return attach(file);
  composer.suggest({});
  usePicture(file, file.name || "pasted.png");
}

/** All pictures of a chat travel in one body. */
async function attach(file) {
  if (attachments.isFull) {
    return showNotice(`This chat has room for ${facts.max_chat_pictures} pictures: ${file.name} is left out.`);
  }
  const others = [picture, ...attachments.list, ...conversation.turns.flatMap(({ pictures = [] }) => pictures)];
  const taken = others.reduce((sum, other) => sum + (other?.blob.size ?? 0), 0);
  const maxBytes = Math.max(0, largestPictureBytes(facts) - taken);
  try {
    attachments.add(await pictureOf(file, file.name || "pasted.png", { maxBytes }));
  } catch (error) {
    showError(error);
  }
}

const readsNoPictures = () =>
  new CallError({
    title: "This model reads no pictures",
    message: `${facts.model} takes text alone.`,
    remedy: "Write instead, or serve a model that reads them, such as moondream2.",
  });

/** The picture of a running call stays: what it finds is drawn there. */
function isBusy() {
  if (running) showNotice("An answer is on its way. Stop it first to change the picture.");
  return running !== null;
}

// ---------------------------------------------------------------------- a call

async function run() {
  if (running) return;
  const asked = form();
  const problem = whatIsMissing(asked);
  if (problem) return showError(problem);
  clearBanners();
  const call = callOf(asked);
  const entry = { form: asked, call, outcome: emptyOutcome(), response: null, error: null, label: labelOf(asked) };
  running = new AbortController();
  composer.setRunning(true);
  progress.begin();
  if (asked.skill === "chat") {
    composer.setText("");
    attachments.set([]);
  } else if (asked.picture && oneColumn.matches) showStage();
  inspector.setResponse(null);
  downloads.offer(null);
  try {
    await perform(entry, { key: settings.key, signal: running.signal, onProgress: () => showProgress(entry) });
  } catch (error) {
    if (error.name === "AbortError") entry.wasStopped = true;
    else entry.error = error;
  }
  running = null;
  progress.end();
  composer.setRunning(false);
  finish(entry);
}

/** With one column the form is below the picture; so is the keyboard of a phone. */
function showStage() {
  byId("prompt").blur();
  scrollTo(byId("stage"), "start");
}

function scrollTo(node, block) {
  node.scrollIntoView({ block, behavior: calm.matches ? "auto" : "smooth" });
}

function showProgress(entry) {
  const { form: asked, outcome, label } = entry;
  progress.say(stepOf(asked, outcome));
  if (asked.skill === "chat") return conversation.showPending(asked.text, asked.attached, outcome);
  results.show(outcome, { label, picture: asked.picture, isBusy: true });
  if (!outcome.text || entry.hasText) return;
  entry.hasText = true;
  if (oneColumn.matches) scrollTo(byId("result"), "nearest");
}

function finish(entry) {
  if (entry.form.skill === "chat") finishChat(entry);
  history.add(entry);
  showEntry(entry);
  if (results.shapes.length > 0) scrollTo(byId("stage"), "nearest");
}

/** An answer that was stopped stays as far as it came. What was not answered can be sent again. */
function finishChat(entry) {
  const { form: asked, outcome, error, wasStopped } = entry;
  if (error || (wasStopped && !outcome.text)) {
    conversation.show();
    if (composer.text === "") composer.setText(asked.text);
    attachments.set(asked.attached);
    return;
  }
  const note = wasStopped ? "stopped" : outcome.finishReason === "length" ? "cut at the limit" : "";
  const { isUnfolded } = conversation;
  const answer = { role: "assistant", content: outcome.text, thoughts: outcome.reasoning?.text, isUnfolded };
  answer.note = note || (outcome.text.trim() === "" ? "an empty answer" : "");
  conversation.set([...asked.turns, { role: "user", content: asked.text, pictures: asked.attached }, answer]);
  entry.turns = conversation.turns;
}

/** What a finished call looks like, now or when it is opened again. */
function showEntry(entry) {
  const { form: asked, call, outcome, response, error, label, seen, wasStopped } = entry;
  showIdle();
  if (error) {
    const action = error.status === 401 ? ["Enter API key", () => settings.open("api-key")] : null;
    showError(error, action);
    inspector.setResponse(error.body);
    if (!outcome.text && !outcome.points && !outcome.objects) return;
  } else inspector.setResponse(response);
  const isChat = asked.skill === "chat";
  const shown = isChat ? { ...outcome, text: null, reasoning: null } : outcome;
  results.show(shown, { label, picture: asked.picture, isBusy: false, seen, wasStopped: wasStopped && !isChat });
  downloads.offer(entry);
  inspector.setCall(call, facts.needs_key || settings.key !== "");
  if (!isChat) return;
  byId("result").hidden = outcome.metrics === null;
  if (outcome.text) byId("live").textContent = `${wasStopped ? "Stopped. " : ""}Answer: ${outcome.text}`;
}

/** Earlier calls may be of another model. */
function whyNotHere({ form: asked }) {
  if (!composer.named(asked.skill)) return `${facts.model} does not know this skill.`;
  return composer.unavailable[asked.skill] ?? "";
}

function reopen(entry) {
  if (running) return;
  const { form: asked } = entry;
  clearBanners();
  showPicture(asked.picture);
  composer.restore(asked.skill === "chat" ? { ...asked, text: "" } : asked);
  shownSkill = asked.skill;
  settings.values = asked.settings;
  adapters.chosen = asked.adapter;
  conversation.set(entry.turns ?? asked.turns);
  attachments.set(entry.turns ? [] : asked.attached);
  marks.set(asked.marks);
  showEntry(entry);
}

const labelOf = (asked) => (asked.skill === "caption" ? asked.length : asked.text);

function whatIsMissing(asked) {
  if (composer.skill.needsPicture && !asked.picture) {
    return new CallError({
      title: "There is no picture yet",
      message: `${composer.skill.title} needs one.`,
      remedy: "Drop, paste or choose a picture, or take one of the samples.",
    });
  }
  if (composer.skill.field && asked.text.trim() === "") {
    byId("prompt").focus();
    return new CallError({
      title: "There is nothing to ask yet",
      message: `The field for “${composer.skill.label.toLowerCase()}” is empty.`,
      remedy: "Type some words first.",
    });
  }
  if (composer.skill.field === "object" && namesOf(asked.text).includes("")) {
    byId("prompt").focus();
    return new CallError({
      title: "A comma has no name beside it",
      message: `“${asked.text}” names nothing before or after a comma.`,
      remedy: "Leave the comma out, or type a name.",
    });
  }
  return null;
}

// ---------------------------------------------------------------------- the start

function askForAdapters() {
  if (facts.skills && (!facts.needs_key || settings.key !== "")) adapters.ask(settings.key).then(onFormChange);
}

function onFacts(found) {
  const readsPictures = found.reads_pictures ?? true; // unknown while it loads
  const isFirst = facts === NOTHING_KNOWN;
  facts = found;
  composer.setAvailable(found, readsPictures);
  settings.showDefaults(found.defaults, readsPictures);
  byId("desk").classList.toggle("is-text", !readsPictures);
  byId("picture-side").hidden = !readsPictures;
  if (!readsPictures) {
    byId("visit-side").prepend(byId("code-side"));
    byId("reasoning").checked = true;
  } else if (isFirst) showSamples(byId("samples"), useSample).catch(showError);
  byId("desk").hidden = false;
  history.show();
  askForAdapters();
  onSkillOrForm();
}

function onNoFacts(error) {
  byId("desk").hidden = false;
  showError(error);
}

setUpTheme();
setUpIntake({ onFile: useFile, onError: showError });
setUpWebcam({ onFile: useFile, onError: showError });
setUpKeyboard({
  onRun: run,
  onStop: stop,
  onSkill: (index) => composer.offered[index] && composer.choose(composer.offered[index].name),
  onSettings: () => settings.open(),
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("stop").addEventListener("click", stop);
byId("remove-picture").addEventListener("click", removePicture);
byId("new-chat").addEventListener("click", () => {
  newChat();
  showIdle();
  onFormChange();
});
onSkillOrForm();
history.load();
connect(onFacts, onNoFacts);

function stop() {
  running?.abort();
}
