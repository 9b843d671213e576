/** The pictures that come with the page, each with words to ask about it. */

import { fetchJson } from "./api.js";
import { element } from "./dom.js";

const FOLDER = new URL("samples/", import.meta.url);

/** A button for each; `onChoose` gets the sample and the address of its picture. */
export async function showSamples(row, onChoose) {
  const samples = await fetchJson("playground/samples.json");
  const buttons = samples.map((sample) => {
    const source = String(new URL(sample.file, FOLDER));
    const picture = element("img", { src: source, alt: sample.title, width: 96, height: 72 });
    const button = element("button", { type: "button", className: "sample", title: sample.title }, picture);
    button.setAttribute("aria-pressed", "false");
    button.dataset.source = source;
    button.addEventListener("click", () => onChoose(sample, source));
    return button;
  });
  row.replaceChildren(...buttons);
}
