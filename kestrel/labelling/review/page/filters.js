/* Which pictures and objects are shown, in which order. */

const NUM_BINS = 40;
const NO_FILTER = { search: "", kind: "all", decision: "all", low: 0, high: 1 };
const KINDS = {
  all: () => true,
  objects: ({ objects }) => objects.length > 0,
  none: ({ objects, answer, error }) => !objects.length && answer === undefined && error === undefined,
  text: ({ answer }) => answer !== undefined,
  errors: ({ error, unread }) => (error ?? unread) !== undefined,
};
const last = (score, sign) => (score === null ? Infinity : sign * score);
const ORDERS = {
  given: (a, b) => a.number - b.number,
  low: (a, b) => last(a.low, 1) - last(b.low, 1) || a.number - b.number,
  high: (a, b) => last(a.high, -1) - last(b.high, -1) || a.number - b.number,
  most: (a, b) => b.objects.length - a.objects.length || a.number - b.number,
};

class Filters {
  constructor(onChange) {
    this.labels = new Set();
    this.sort = "given";
    Object.assign(this, NO_FILTER);
    this.onChange = onChange;
    for (const name of ["kind", "decision", "sort"]) {
      byId(name).addEventListener("change", () => this.change({ [name]: byId(name).value }));
    }
    byId("search").addEventListener("input", () => this.change({ search: byId("search").value.trim().toLowerCase() }));
    const [low, high] = [byId("score-low"), byId("score-high")];
    low.addEventListener("input", () => this.change({ low: Math.min(Number(low.value), this.high) }));
    high.addEventListener("input", () => this.change({ high: Math.max(Number(high.value), this.low) }));
    byId("clear").addEventListener("click", () => this.clear());
    this.drawClasses();
    this.drawHistogram();
    this.show();
  }

  clear() {
    this.labels.clear();
    this.change(NO_FILTER);
  }

  change(values) {
    Object.assign(this, values);
    this.show();
    this.onChange();
  }

  /** Controls as the filters are; both ends of the score may touch, and then the one that can move is on top. */
  show() {
    for (const name of ["kind", "decision", "sort"]) byId(name).value = this[name];
    if (this.search === "") byId("search").value = "";
    byId("score-low").value = this.low;
    byId("score-high").value = this.high;
    byId("score-low").classList.toggle("is-top", this.low > 0.5);
    byId("score-range").textContent = `${scoreText(this.low)} – ${scoreText(this.high)}`;
    byId("histogram").childNodes.forEach((bar, bin) =>
      bar.classList.toggle("is-out", (bin + 1) / NUM_BINS <= this.low || bin / NUM_BINS >= this.high));
    for (const chip of byId("classes").children) chip.ariaPressed = String(this.labels.has(chip.value));
    byId("num-filters").hidden = byId("clear").hidden = this.number === 0;
    byId("num-filters").textContent = this.number;
  }

  get number() {
    const isSet = ["search", "kind", "decision"].filter((name) => this[name] !== NO_FILTER[name]).length;
    return isSet + this.hasScores + (this.labels.size > 0);
  }

  get hasScores() {
    return this.low > 0 || this.high < 1;
  }

  /** Indices of the objects that are drawn. */
  shownObjects({ objects }) {
    const indices = [...objects.keys()];
    return indices.filter((index) => {
      const { label, score } = objects[index];
      if (this.labels.size && !this.labels.has(label)) return false;
      return !this.hasScores || (score !== null && score >= this.low && score <= this.high);
    });
  }

  matches(picture) {
    if (!KINDS[this.kind](picture) || !picture.words.includes(this.search)) return false;
    const shown = this.shownObjects(picture);
    if ((this.labels.size || this.hasScores) && shown.length === 0) return false;
    if (this.decision === "all") return true;
    if (this.decision === UNDECIDED) return picture.isLabelled && !decisions.isDecided(picture);
    const all = [PICTURE, ...shown].map((index) => decisions.of(picture, index));
    return all.includes(this.decision);
  }

  chosen() {
    return pictures.filter((picture) => this.matches(picture)).sort(ORDERS[this.sort]);
  }

  drawClasses() {
    const numbers = new Map();
    for (const { objects } of pictures)
      for (const { label } of objects) numbers.set(label, (numbers.get(label) ?? 0) + 1);
    const chips = facts.labels.filter((label) => numbers.has(label)).map((label) => {
      const chip = element("button", { type: "button", className: "chip", value: label, ariaPressed: "false" });
      const number = element("span", { className: "num" }, numbers.get(label).toLocaleString("en"));
      chip.append(swatch(label), isolated(label), number);
      chip.addEventListener("click", () => {
        if (!this.labels.delete(label)) this.labels.add(label);
        this.change({});
      });
      return chip;
    });
    byId("classes").replaceChildren(...chips);
    byId("classes").hidden = chips.length === 0;
  }

  drawHistogram() {
    const bins = new Array(NUM_BINS).fill(0);
    for (const { objects } of pictures)
      for (const { score } of objects)
        if (score !== null) bins[Math.min(NUM_BINS - 1, Math.floor(score * NUM_BINS))]++;
    const most = Math.max(...bins);
    byId("scores").hidden = most === 0;
    byId("histogram").replaceChildren(...bins.map((number, bin) => {
      const height = number ? Math.max(2, (28 * number) / most) : 0;
      return drawn("rect", { x: bin * 5 + 0.5, y: 30 - height, width: 4, height });
    }));
  }
}

function swatch(label, text = "") {
  const made = element("span", { className: "swatch" }, text);
  made.style.setProperty("--colour", colours.get(label));
  return made;
}
