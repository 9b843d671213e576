/** What this server is: its model, what it can do, and whether it asks for a key. */

import { fetchJson } from "./api.js";
import { byId } from "./dom.js";
import { SKILLS } from "./skills.js";

const STARTING_RETRY_MS = 1500;

/** Asks until the model is there; each answer goes to `onFacts`. */
export async function connect(onFacts, onError) {
  try {
    const facts = await fetchJson("playground/server.json");
    show(facts);
    onFacts({ ...facts, unavailable: unavailableOf(facts) });
    if (facts.status === "starting") setTimeout(() => connect(onFacts, onError), STARTING_RETRY_MS);
  } catch (error) {
    byId("model-name").textContent = "not connected";
    byId("model-dot").dataset.status = "failed";
    onError(error);
  }
}

function show(facts) {
  byId("version").textContent = facts.version;
  byId("model-dot").dataset.status = facts.status;
  byId("model-name").textContent =
    facts.model ?? (facts.status === "starting" ? "the model is loading…" : facts.status);
  byId("model-context").textContent = facts.context_tokens ? `${facts.context_tokens.toLocaleString("en")} tokens` : "";
  byId("model-badge").hidden = byId("demonstration-note").hidden = !facts.is_demonstration;
}

function unavailableOf({ skills, model, reads_pictures: readsPictures }) {
  if (!skills) return {};
  const reasonOf = ({ name, path }) => {
    if (name === "chat" && !readsPictures) return `${model} has no chat template; --chat-template FILE gives it one.`;
    return name === "chat" ? `This server has no /${path}.` : `${model} does not know this skill.`;
  };
  const missing = SKILLS.filter(({ name }) => !skills.includes(name));
  return Object.fromEntries(missing.map((skill) => [skill.name, reasonOf(skill)]));
}
