/** The ways a picture comes in: dropped, pasted, picked from files, or taken with the camera. */

import { CallError } from "./api.js";
import { byId } from "./dom.js";

/** `onFile` gets the file, and what it was dropped or pasted on. */
export function setUpIntake({ onFile, onError }) {
  for (const [input, ...buttons] of [
    ["file", "pick", "pick-first"],
    ["photo", "camera", "camera-first"],
  ]) {
    for (const button of buttons) byId(button).addEventListener("click", () => byId(input).click());
    byId(input).addEventListener("change", (event) => {
      if (event.target.files.length > 0) onFile(event.target.files[0]);
      event.target.value = ""; // the same file may be picked again
    });
  }
  setUpDrop(onFile, onError);
  document.addEventListener("paste", (event) => {
    const file = pictureIn(event.clipboardData);
    if (!file) return; // text goes where the cursor is
    event.preventDefault();
    onFile(file, event.target);
  });
}

function setUpDrop(onFile, onError) {
  const stage = byId("stage");
  let depth = 0; // enter and leave also fire for every child
  const set = (value) => {
    depth = Math.max(0, value);
    stage.classList.toggle("is-over", depth > 0);
  };
  document.addEventListener("dragenter", () => set(depth + 1));
  document.addEventListener("dragleave", () => set(depth - 1));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    set(0);
    const file = pictureIn(event.dataTransfer);
    if (file) onFile(file, event.target);
    else onError(noPicture());
  });
}

const pictureIn = (transfer) =>
  [...(transfer?.files ?? [])].find((file) => file.type.startsWith("image/")) ?? transfer?.files?.[0] ?? null;

const noPicture = () =>
  new CallError({
    title: "There was no picture in that",
    message: "Only picture files can be dropped here; this page fetches nothing from other sites.",
    remedy: "Save the picture first, then drop the file, or copy it and paste.",
  });
