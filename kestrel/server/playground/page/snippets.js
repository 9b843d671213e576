/** The same call as JSON, as a curl command for macOS and Linux, and as Python. Pictures are read from files. */

import { ROOT } from "./api.js";
import { shownBytes } from "./picture.js";
import { pictureAt, withPictures } from "./skills.js";

const KEY_VARIABLE = "KESTREL_API_KEY";
const CUT = "\0file\0"; // where a picture's file goes

export function requestJson({ body, pictures }) {
  const shortened = ({ mediaType, blob }) => `data:${mediaType};base64,… (${shownBytes(blob.size)})`;
  return prettyJson(withPictures(body, pictures.map(shortened)));
}

/** Indented, with lists of plain values on one line. */
export const prettyJson = (value) =>
  JSON.stringify(value, null, 2).replace(/\[\n[^[\]{}]*\]/g, (list) =>
    list.replace(/\n\s*/g, " ").replace("[ ", "[").replace(" ]", "]"),
  );

export function curlCommand(call, { usesKey }) {
  const flags = [
    `curl -sS${call.body.stream ? "N" : ""} ${quoted(String(new URL(call.path, ROOT)))}`,
    "-H 'Content-Type: application/json'",
    ...(usesKey ? [`-H "Authorization: Bearer $${KEY_VARIABLE}"`] : []),
    "--data-binary @-",
  ].join(" \\\n  ");
  const { pictures } = call;
  const cut = pictures.map(({ mediaType }) => `data:${mediaType};base64,${CUT}`);
  const body = JSON.stringify(withPictures(call.body, cut));
  const [first, ...rest] = body.split(JSON.stringify(CUT).slice(1, -1));
  if (pictures.length === 0) return `${keyNote(usesKey)}printf '%s' ${quoted(first)} |\n${flags}\n`;
  const lines = [`  printf '%s' ${quoted(first)}`];
  for (const [index, piece] of rest.entries())
    lines.push(`  base64 < ${quoted(pictures[index].name)} | tr -d '\\n'`, `  printf '%s' ${quoted(piece)}`);
  const notes = pictures.map((picture) => fetchLine(picture) + sizeNote(picture)).join("");
  return `${keyNote(usesKey)}${notes}{\n${lines.join("\n")}\n} |\n${flags}\n`;
}

export function pythonCode(call, { usesKey }) {
  const { pictures, body } = call;
  const needs = { base64: pictures.length > 0, json: body.stream, os: usesKey };
  const imports = Object.keys(needs)
    .filter((name) => needs[name])
    .map((name) => `import ${name}`);
  const parts = [[...imports, ...(imports.length ? [""] : []), "import httpx", ""].join("\n")];
  for (const [index, picture] of pictures.entries()) {
    parts.push(
      `${fetchNote(picture)}${sizeNote(picture)}with open(${literal(picture.name)}, "rb") as file:\n` +
        `    ${variableOf(index)} = "data:${picture.mediaType};base64," + base64.b64encode(file.read()).decode()\n`,
    );
  }
  parts.push(`body = ${literal(body)}\n`);
  if (usesKey) parts.push(`headers = {"Authorization": f"Bearer {os.environ['${KEY_VARIABLE}']}"}\n`);
  const address = literal(String(new URL(call.path, ROOT)));
  const options = `json=body,${usesKey ? " headers=headers," : ""} timeout=600`;
  parts.push(body.stream ? streamingLines(address, options, call.skill) : plainLines(address, options, call));
  return parts.join("\n");
}

const RESULT_FIELDS = {
  query: '["answer"]',
  caption: '["caption"]',
  point: '["points"]',
  detect: '["objects"]',
  segment: '["path"]',
  chat: '["choices"][0]["message"]["content"]',
  complete: '["choices"][0]["text"]',
};

function plainLines(address, options, { skill, body }) {
  const field = skill === "segment" && Array.isArray(body.object) ? '["segments"]' : RESULT_FIELDS[skill];
  return `response = httpx.post(${address}, ${options})\nresponse.raise_for_status()\nprint(response.json()${field})\n`;
}

const streamingLines = (address, options, skill) =>
  [
    `with httpx.stream("POST", ${address}, ${options}) as response:`,
    "    response.raise_for_status()",
    "    for line in response.iter_lines():",
    `        if line.startswith("data: ")${["chat", "complete"].includes(skill) ? ' and line != "data: [DONE]"' : ""}:`,
    "            print(json.loads(line[6:]))",
    "",
  ].join("\n");

/** For a POSIX shell. */
const quoted = (text) => (/^[\w./:-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

const variableOf = (index) => (Number(index) === 0 ? "picture" : `picture_${Number(index) + 1}`);

/** A JSON value as Python writes it; pictures are variables. */
function literal(value, indent = "") {
  const index = pictureAt(value);
  if (index !== undefined) return variableOf(index);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => literal(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length <= 72 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

/** Gets a sample first, so that the code runs as it was copied. */
const fetchLine = ({ name, source }) => (source ? `curl -sSo ${quoted(name)} ${quoted(source)}\n` : "");

const fetchNote = (picture) => (picture.source ? `# ${fetchLine(picture)}` : "");

const sizeNote = ({ shrunkFrom }) =>
  shrunkFrom ? "# The page sent a smaller copy: the file itself is over this server's limit.\n" : "";

const keyNote = (usesKey) => (usesKey ? `# export ${KEY_VARIABLE}=… first\n` : "");
