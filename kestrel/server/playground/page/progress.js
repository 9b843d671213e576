/** What the page is doing while a call runs, in words, with seconds that count. */

import { byId } from "./dom.js";

const TICK_MS = 200;

export class Progress {
  begin() {
    this.beganMs = performance.now();
    this.timer = setInterval(() => this.tick(), TICK_MS);
    this.tick();
    byId("running").hidden = false;
  }

  /** Screen readers hear of each step, and of no second. */
  say(words) {
    if (byId("doing").textContent !== words) byId("doing").textContent = words;
  }

  end() {
    clearInterval(this.timer);
    byId("running").hidden = true;
    this.say("");
  }

  tick() {
    byId("doing-seconds").textContent = `${Math.floor((performance.now() - this.beganMs) / 1000)} s`;
  }
}

/** The step that a call has come to, by what it has brought so far. */
export function stepOf({ picture, streaming }, { text, reasoning, points, objects, masks }) {
  const soFar = (items) => `${items.length} so far`;
  if (points || objects) return `Finding: ${soFar(points ?? objects)}`;
  if (masks) return "Outlining";
  if (text) return "Writing";
  const places = reasoning?.grounding.flatMap((ground) => ground.points) ?? [];
  if (reasoning) return places.length > 0 ? `Thinking: ${soFar(places)}` : "Thinking";
  if (!streaming) return "Waiting for the whole answer";
  return picture ? "Looking at the picture" : "Reading";
}
