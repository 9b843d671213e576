/* Decisions: in memory, and in the browser's storage where it allows that. One entry for each picture touched. */

const PREFIX = `kestrel-review:${facts.job}:`;
const UNDECIDED = "undecided";
const PICTURE = -1; // in place of an object's index

class Decisions {
  constructor() {
    /** key -> {about, whole, objects: index -> {label, place, decision}, exported: what was exported last} */
    this.entries = new Map();
    this.waiting = new Set();
    this.history = [];
    this.isKept = true;
    this.numStale = this.numGone = 0;
    try {
      for (let i = 0; i < localStorage.length; i++) this.take(localStorage.key(i));
    } catch {
      this.isKept = false;
    }
    for (const picture of pictures) this.forgetStale(picture);
    if (facts.pages.length === 1) this.leaveOutGone();
  }

  take(name) {
    if (!name.startsWith(PREFIX)) return;
    const key = name.slice(PREFIX.length);
    try {
      const { about, whole, objects, exported } = JSON.parse(localStorage.getItem(name));
      this.entries.set(key, { about, whole, objects: new Map(objects), exported });
    } catch {
      this.entries.delete(key); // removed, or not ours
    }
    this.note(key);
  }

  /** Decisions about something that was labelled anew since. */
  forgetStale(picture) {
    const entry = this.entries.get(picture.key);
    if (!entry || entry.about === picture.about) return;
    if (entry.whole !== undefined) this.numStale++;
    entry.whole = undefined;
    for (const [index, { label, place }] of entry.objects) {
      const now = picture.objects[index];
      if (now && now.label === label && String(now.place) === String(place)) continue;
      entry.objects.delete(index);
      this.numStale++;
    }
    entry.about = picture.about;
    this.keep(picture.key);
  }

  /** Other pictures were once labelled in the same place. What was decided about them stays in the storage. */
  leaveOutGone() {
    const known = new Set(pictures.map(({ key }) => key));
    for (const key of [...this.entries.keys()].filter((key) => !known.has(key))) {
      this.entries.delete(key);
      this.waiting.delete(key);
      this.numGone++;
    }
  }

  of(picture, index = PICTURE) {
    const entry = this.entries.get(picture.key);
    if (index === PICTURE) return entry?.whole ?? picture.decision;
    return entry?.objects.get(index)?.decision ?? picture.objects[index].decision;
  }

  /** As a whole, or each of its objects. */
  isDecided(picture) {
    if (this.of(picture) !== UNDECIDED) return true;
    return picture.objects.length > 0 && picture.objects.every((_, index) => this.of(picture, index) !== UNDECIDED);
  }

  set(picture, index, decision) {
    const before = this.of(picture, index);
    if (before === decision || !picture.isLabelled) return false;
    this.history.push({ picture, index, before });
    this.put(picture, index, decision);
    return true;
  }

  /** The last decision that is taken back, if there is one. */
  undo() {
    const last = this.history.pop();
    if (last) this.put(last.picture, last.index, last.before);
    return last;
  }

  put(picture, index, decision) {
    const entry = this.entries.get(picture.key) ?? { about: picture.about, objects: new Map() };
    this.entries.set(picture.key, entry);
    const object = picture.objects[index];
    // As the labels have it: nothing to say, unless an exported file said otherwise.
    const isAsGiven = decision === (object ?? picture).decision && entry.exported === undefined;
    if (index === PICTURE) entry.whole = isAsGiven ? undefined : decision;
    else if (isAsGiven) entry.objects.delete(index);
    else entry.objects.set(index, { label: object.label, place: object.place, decision });
    this.keep(picture.key);
  }

  keep(key) {
    const entry = this.entries.get(key);
    if (said(entry) === "" && entry.exported === undefined) this.entries.delete(key);
    this.note(key);
    try {
      if (!this.entries.has(key)) localStorage.removeItem(PREFIX + key);
      else localStorage.setItem(PREFIX + key, JSON.stringify({ ...entry, objects: [...entry.objects] }));
    } catch {
      this.isKept = false;
    }
  }

  /** Whether it says something else than the last file did. */
  note(key) {
    const entry = this.entries.get(key);
    if (entry && said(entry) !== (entry.exported ?? "")) this.waiting.add(key);
    else this.waiting.delete(key);
  }

  /** The file, as text. Its decisions count as exported from now on. */
  exported() {
    const made = [];
    for (const [key, entry] of [...this.entries].sort(([a], [b]) => (a < b ? -1 : 1))) {
      const text = said(entry);
      if (text !== "") made.push({ key, ...JSON.parse(text) });
      entry.exported = text;
      this.keep(key);
    }
    const { version, job, title } = facts;
    const exported = new Date().toISOString();
    return `${JSON.stringify({ kestrel_review: version, job, title, exported, pictures: made }, null, 1)}\n`;
  }
}

/** What an entry says, as text to compare; empty when it says nothing. */
function said({ about, whole, objects }) {
  if (whole === undefined && objects.size === 0) return "";
  const listed = [...objects].sort(([a], [b]) => a - b).map(([index, rest]) => ({ index, ...rest }));
  return JSON.stringify({ about, decision: whole, objects: listed });
}

function download(name, text) {
  const file = new Blob([text], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(file), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
