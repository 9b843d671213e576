/** A finished call as files: its answer as JSON, what was found as COCO, the picture with the drawing as PNG. */

import { cocoOf } from "./coco.js";
import { byId, element } from "./dom.js";
import { prettyJson } from "./snippets.js";
import { snapshotOf } from "./snapshot.js";

const FINDERS = ["point", "detect", "segment"];
const KINDS = {
  png: {
    isThere: () => byId("overlay").querySelector(".shape"),
    blobOf: ({ form }) => snapshotOf(form.picture, byId("overlay")),
  },
  json: { isThere: () => true, blobOf: ({ response }) => jsonBlob(response) },
  "coco.json": { isThere: ({ form }) => FINDERS.includes(form.skill), blobOf: (entry) => jsonBlob(cocoOf(entry)) },
};

export class Downloads {
  constructor() {
    this.entry = null;
    for (const [ending, { blobOf }] of Object.entries(KINDS)) {
      const onClick = async () => save(await blobOf(this.entry), nameOf(this.entry, ending));
      buttonOf(ending).addEventListener("click", onClick);
    }
  }

  /** Once its answer is drawn. Null, and calls without a whole answer, offer nothing. */
  offer(entry) {
    this.entry = entry;
    const isWhole = Boolean(entry?.response && !entry.error);
    byId("downloads").hidden = !isWhole;
    for (const [ending, { isThere }] of Object.entries(KINDS)) buttonOf(ending).hidden = !isWhole || !isThere(entry);
  }
}

const buttonOf = (ending) => byId(`download-${ending.split(".")[0]}`);
const jsonBlob = (value) => new Blob([`${prettyJson(value)}\n`], { type: "application/json" });
const nameOf = ({ form }, ending) => `${form.picture?.name.replace(/\.\w+$/, "") ?? "answer"}-${form.skill}.${ending}`;

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser reads it a little later
}
