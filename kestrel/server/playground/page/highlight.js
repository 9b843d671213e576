/** Colours for shown code: strings, numbers, words of the language and comments, as plain spans. */

import { element } from "./dom.js";

const PIECES =
  /(?<comment>^#.*$)|(?<name>"[^"\\]*(?:\\.[^"\\]*)*"(?=:))|(?<text>"[^"\\]*(?:\\.[^"\\]*)*"|'[^']*')|(?<number>-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b)|(?<word>\b(?:true|false|null|True|False|None|import|with|as|for|in|if|and|not|open|print|curl|base64|printf|tr)\b)/gm;

const LONGEST = 60_000;

export function highlighted(code) {
  if (code.length > LONGEST) return [code];
  const nodes = [];
  let end = 0;
  for (const match of code.matchAll(PIECES)) {
    const [kind] = Object.entries(match.groups).find(([, piece]) => piece !== undefined);
    nodes.push(code.slice(end, match.index), element("span", { className: `code-${kind}` }, match[0]));
    end = match.index + match[0].length;
  }
  return [...nodes, code.slice(end)];
}
