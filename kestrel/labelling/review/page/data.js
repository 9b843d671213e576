/* What the page holds, and elements made with it. Texts only ever become text nodes and attributes. */

const COLOURS = [
  "#ff4d54", "#2694f0", "#ffbe20", "#24be78", "#a85cec", "#ff7e30",
  "#18bcc8", "#f05caa", "#9ccc3c", "#7f8cff", "#d98a5b", "#c9c4bb",
];
const byId = (id) => document.getElementById(id);
const facts = JSON.parse(document.querySelector("script.facts").textContent);
const thumbnails = [...document.querySelectorAll("script.thumb")];
const pictures = [...document.querySelectorAll("script.row")].map((node, number) => {
  const picture = { number, ...JSON.parse(node.textContent) };
  picture.isLabelled = picture.error === undefined;
  const scores = picture.objects.map(({ score }) => score).filter((score) => score !== null);
  picture.low = scores.length ? Math.min(...scores) : null;
  picture.high = scores.length ? Math.max(...scores) : null;
  picture.words = [picture.file, picture.key, picture.question, picture.answer, picture.error, picture.unread]
    .concat(picture.objects.map(({ label }) => label))
    .join("\n")
    .toLowerCase();
  return picture;
});
const colours = new Map(facts.labels.map((label, index) => [label, COLOURS[index % COLOURS.length]]));

/** Thumbnails stay encoded text until they are looked at. */
const thumbnailOf = ({ number }) => {
  const encoded = thumbnails[number].textContent;
  return encoded && `data:image/jpeg;base64,${encoded}`;
};

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A user's text keeps its own direction, whatever stands around it. */
const isolated = (text, className = "") => element("bdi", { className, dir: "auto" }, text);
const counted = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
const scoreText = (score) => (score === null ? "–" : score.toFixed(2));
