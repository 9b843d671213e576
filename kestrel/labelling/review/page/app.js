/* The page: one chosen picture, perhaps one chosen object in it, decisions about them, keys, export. */

const decisions = new Decisions();
let items = pictures;
let current = null;
let object = null; // its index, or null: the picture as a whole
const isNarrow = matchMedia("(max-width: 960px)");

const grid = new Grid(byId("grid"), { makeTile });
const detail = new Detail(byId("detail"), {
  onChoose: (index) => choose(current, index),
  onDecide: (index, decision) => (index === PICTURE ? decideChosen(decision, true) : decide(current, index, decision)),
  onStep: (by) => step(by),
  onClose: () => close(),
});
const filters = new Filters(() => list());

// ---------------------------------------------------------------- the list

function list() {
  items = filters.chosen();
  if (!items.includes(current)) {
    current = items[0] ?? null;
    object = null;
  } else if (object !== null && !filters.shownObjects(current).includes(object)) object = null;
  grid.current = current;
  grid.show(items);
  const numObjects = items.reduce((sum, picture) => sum + filters.shownObjects(picture).length, 0);
  const outOf = items.length < pictures.length ? ` of ${pictures.length.toLocaleString("en")}` : "";
  byId("count").textContent = `${counted(items.length, "picture")}${outOf} shown · ${counted(numObjects, "object")}`;
  byId("empty").hidden = items.length > 0;
  byId("empty").textContent = pictures.length ? "No picture matches these filters." : "There are no pictures.";
  if (!current) close();
  refresh();
}

function makeTile(picture, index, total) {
  const node = element("article", { className: "tile", tabIndex: picture === current ? 0 : -1, role: "listitem" });
  node.setAttribute("aria-posinset", index + 1);
  node.setAttribute("aria-setsize", total);
  node.dataset.key = picture.key;
  const drawing = pictureFigure(picture);
  const state = element("span", { className: "state" });
  const buttons = decisionButtons(picture.file, null, (decision) => {
    choose(picture, null);
    decide(picture, PICTURE, decision);
  });
  for (const button of buttons.box.children) button.tabIndex = -1;
  const name = element("p", { className: "tile-name" }, isolated(picture.file));
  const foot = element("div", { className: "tile-foot" }, tileSummary(picture));
  if (picture.isLabelled) foot.append(buttons.box);
  node.append(element("div", { className: "tile-picture" }, drawing.figure, state), name, foot);
  node.addEventListener("click", () => {
    choose(picture, null);
    open();
  });
  const fill = () => {
    const decision = decisions.of(picture);
    drawing.fill(filters.shownObjects(picture), picture === current ? object : null);
    node.dataset.decision = decision;
    node.tabIndex = picture === current ? 0 : -1;
    if (picture === current) node.setAttribute("aria-current", "true");
    else node.removeAttribute("aria-current");
    state.replaceChildren(...stateOf(picture));
    node.setAttribute("aria-label", spoken(picture));
    buttons.fill(decision);
  };
  return { node, fill };
}

function tileSummary({ objects, answer, error, unread, low, high }) {
  if ((error ?? unread) !== undefined) return element("span", { className: "tile-summary is-error" }, "Error");
  const isText = answer !== undefined;
  if (isText) return element("span", { className: "tile-summary tile-answer", dir: "auto", title: answer }, answer);
  if (!objects.length) return element("span", { className: "tile-summary" }, "Nothing found");
  const range = low === high ? scoreText(low) : `${scoreText(low)}–${scoreText(high)}`;
  const scores = low === null ? "" : element("span", { className: "num" }, range);
  return element("span", { className: "tile-summary" }, counted(objects.length, "object"), scores);
}

function stateOf(picture) {
  const decision = decisions.of(picture);
  if (decision !== UNDECIDED) return [sign(decision), SAID[decision]];
  const decided = picture.objects.filter((_, index) => decisions.of(picture, index) !== UNDECIDED).length;
  return decided ? [`${decided} of ${picture.objects.length} decided`] : [];
}

function spoken(picture) {
  const { file, objects, answer, error } = picture;
  const labels = [...new Set(objects.map(({ label }) => label))].slice(0, 5).join(", ");
  const list = objects.length ? `${counted(objects.length, "object")}: ${labels}` : "nothing found";
  const found = error ? `error: ${error}` : answer ?? list;
  return [file, found, stateOf(picture).at(-1) ?? (error ? [] : SAID.undecided)].flat().join(", ");
}

// ---------------------------------------------------------------- choosing

function choose(picture, index) {
  const before = current;
  current = grid.current = picture;
  object = index;
  if (before && before !== picture) grid.fill(before);
  showChosen();
}

function step(by) {
  if (!current) return;
  const to = items[Math.min(items.length - 1, Math.max(0, items.indexOf(current) + by))];
  goTo(to, null);
}

function goTo(picture, index) {
  choose(picture, index);
  grid.reveal(picture);
  const node = isOpen() ? detail.box.querySelector("h2") : grid.tiles.get(picture).node;
  node.focus({ preventScroll: true });
}

/** Through the objects of a picture: before the first one is the picture itself. */
function stepObject(by) {
  if (!current) return;
  const shown = filters.shownObjects(current);
  const to = Math.min(shown.length - 1, shown.indexOf(object) + by);
  choose(current, to < 0 ? null : shown[to]);
  if (object === null) return announce(current.file);
  const { label, score } = current.objects[object];
  announce(`Object ${object + 1}, ${label}, ${scoreText(score)}, ${SAID[decisions.of(current, object)]}`);
}

const isOpen = () => document.body.classList.contains("is-open");

function open() {
  if (!isNarrow.matches) return;
  document.body.classList.add("is-open");
  setBehind(true);
  detail.box.querySelector("h2").focus();
}

function close() {
  if (!isOpen()) return;
  document.body.classList.remove("is-open");
  setBehind(false);
  if (current) goTo(current, object);
}

/** What lies behind an open picture is out of reach. */
function setBehind(isBehind) {
  for (const node of document.querySelectorAll(".bar, .list-side, .foot")) node.inert = isBehind;
}

isNarrow.addEventListener("change", close);

// ---------------------------------------------------------------- deciding

function decide(picture, index, decision) {
  if (!decisions.set(picture, index, decision)) return;
  const what = index === PICTURE ? picture.file : `${picture.objects[index].label} ${index + 1}`;
  announce(`${SAID[decision]}: ${what}`);
  refresh();
}

/** What is chosen, and then on to the next. */
function decideChosen(decision, isWhole) {
  if (!current) return;
  const index = isWhole ? null : object;
  decide(current, index ?? PICTURE, decision);
  if (decision === UNDECIDED) return;
  const shown = filters.shownObjects(current);
  const next = shown[shown.indexOf(index) + 1];
  if (index !== null && next !== undefined) return choose(current, next);
  const at = items.indexOf(current);
  const after = items[at + 1];
  if (after) goTo(after, index === null ? null : filters.shownObjects(after)[0] ?? null);
}

function undo() {
  const undone = decisions.undo();
  if (!undone) return announce("There is nothing to undo");
  const index = undone.index === PICTURE ? null : undone.index;
  if (items.includes(undone.picture)) goTo(undone.picture, index);
  announce(`Undone: ${undone.picture.file}`);
  refresh();
}

function announce(text) {
  byId("live").textContent = text;
}

// ---------------------------------------------------------------- what is said around the pictures

function refresh() {
  showChosen();
  count();
}

function showChosen() {
  if (current) {
    grid.fill(current);
    detail.show(current, `${items.indexOf(current) + 1} of ${items.length}`);
    detail.fill(filters.shownObjects(current), object);
  } else detail.show(null);
}

function count() {
  const total = pictures.filter(({ isLabelled }) => isLabelled).length;
  const decided = pictures.filter((picture) => decisions.isDecided(picture));
  const rejected = decided.filter((picture) => decisions.of(picture) === "rejected").length;
  const share = (number) => `${total ? (100 * number) / total : 0}%`;
  byId("meter-good").style.width = share(decided.length - rejected);
  byId("meter-bad").style.width = share(rejected);
  byId("meter").setAttribute("aria-valuemax", total);
  byId("meter").setAttribute("aria-valuenow", decided.length);
  byId("decided").textContent = `${decided.length.toLocaleString("en")} of ${total.toLocaleString("en")} decided`;
  const numOld = filters.decision === "all" ? 0 : items.filter((picture) => !filters.matches(picture)).length;
  byId("refresh").hidden = numOld === 0;
  byId("refresh").textContent = `Hide ${numOld} that no longer match`;
  byId("undo").disabled = decisions.history.length === 0;
  const waiting = decisions.waiting.size;
  const done = decisions.entries.size ? "All exported" : "";
  byId("export-state").textContent = waiting ? `${waiting.toLocaleString("en")} not exported yet` : done;
  byId("export-state").classList.toggle("is-waiting", waiting > 0);
  byId("export").disabled = decisions.entries.size === 0;
  if (!decisions.isKept) notice("kept", "This browser keeps no decisions: export them before you leave this page.");
}

function notice(id, text) {
  if (byId(`notice-${id}`)) return;
  const button = element("button", { type: "button", className: "quiet icon", ariaLabel: "Close" }, "×");
  const box = element("p", { className: "notice", id: `notice-${id}` }, text, button);
  button.addEventListener("click", () => (box.hidden = true));
  byId("notices").append(box);
}

function exportAll() {
  if (byId("export").disabled) return;
  download(facts.export, decisions.exported());
  announce(`Exported to ${facts.export}`);
  refresh();
}

function linkPages() {
  if (facts.pages.length < 2) return;
  byId("pages").append("Page ", ...facts.pages.map((name, index) => {
    const link = element("a", { href: name }, String(index + 1));
    if (index === facts.page) link.setAttribute("aria-current", "page");
    return link;
  }));
}

// ---------------------------------------------------------------- keys

const KEYS = new Map(Object.entries({
  ArrowRight: () => step(1), j: () => step(1),
  ArrowLeft: () => step(-1), k: () => step(-1),
  ArrowDown: () => stepObject(1), ArrowUp: () => stepObject(-1),
  a: () => decideChosen("accepted", false), A: () => decideChosen("accepted", true),
  r: () => decideChosen("rejected", false), R: () => decideChosen("rejected", true),
  Delete: () => decideChosen(UNDECIDED, false), Backspace: () => decideChosen(UNDECIDED, false),
  u: undo, U: undo, e: exportAll, E: exportAll,
  Home: () => step(-Infinity), End: () => step(Infinity),
  Escape: () => (object === null ? close() : choose(current, null)),
  "?": () => byId("help").showModal(),
  "/": () => {
    byId("filters").open = true;
    byId("search").focus();
  },
}));

document.body.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.matches(".tile")) open();
  const action = KEYS.get(event.key);
  if (!action) return;
  event.preventDefault();
  action();
});

// ---------------------------------------------------------------- start

byId("export").addEventListener("click", exportAll);
byId("undo").addEventListener("click", undo);
byId("open-help").addEventListener("click", () => byId("help").showModal());
byId("refresh").addEventListener("click", list);
addEventListener("storage", ({ key }) => {
  if (!key?.startsWith(PREFIX)) return;
  decisions.take(key); // of another tab with this job
  grid.show(items);
  refresh();
});
addEventListener("beforeunload", (event) => {
  if (!decisions.isKept && decisions.waiting.size) event.preventDefault();
});
byId("filters").open = !isNarrow.matches;
if (decisions.numStale) {
  const number = counted(decisions.numStale, "earlier decision");
  notice("stale", `${number} left out: what they were about was labelled anew.`);
}
if (decisions.numGone) {
  const number = counted(decisions.numGone, "earlier picture");
  notice("gone", `Decisions about ${number} left out: not on this page any more.`);
}
linkPages();
list();
