/* A picture with boxes, points and outlines over it, in units of its thumbnail: the drawing fits at any size. */

const FEW_TAGS = 10;

/** `fill` brings it up to date: which objects are drawn, which one is chosen. */
function pictureFigure(picture, { hasTags = false, onChoose = null } = {}) {
  const [width, height] = picture.thumb;
  const figure = element("figure", { className: "figure" });
  figure.style.setProperty("--aspect", width / height);
  const source = thumbnailOf(picture);
  if (source) figure.append(element("img", { src: source, alt: "", decoding: "async", draggable: false }));
  else figure.append(element("p", { className: "no-picture" }, picture.error ?? picture.unread));
  const viewBox = `0 0 ${width} ${height}`;
  const overlay = drawn("svg", { viewBox, preserveAspectRatio: "none", "aria-hidden": "true" });
  const tags = element("div", { className: "tags", ariaHidden: "true" });
  figure.append(overlay, tags);
  if (onChoose) {
    overlay.addEventListener("click", (event) => {
      const shape = event.target.closest("[data-index]");
      if (shape) onChoose(Number(shape.dataset.index));
    });
  }
  const fill = (shown, chosen) => {
    const order = shown.filter((index) => index !== chosen).concat(shown.includes(chosen) ? [chosen] : []);
    overlay.replaceChildren(...order.map((index) => shapeOf(picture, index, chosen)));
    const isFull = order.length <= FEW_TAGS;
    const tagged = hasTags ? order.filter((index) => picture.objects[index].place.length) : [];
    tags.replaceChildren(...tagged.map((index) => tagOf(picture, index, isFull || index === chosen, index === chosen)));
  };
  return { figure, fill };
}

function shapeOf(picture, index, chosen) {
  const { label, place, path } = picture.objects[index];
  const [width, height] = picture.thumb;
  const group = drawn("g", { class: `shape is-${decisions.of(picture, index)}`, "data-index": index });
  group.classList.toggle("is-chosen", index === chosen);
  group.style.setProperty("--colour", colours.get(label));
  const [left, top, right, bottom] = place.map((share, axis) => share * (axis % 2 ? height : width));
  if (place.length === 2) {
    const dot = `M${left} ${top}h0.001`;
    group.append(drawn("path", { class: "dot-under", d: dot }), drawn("path", { class: "dot", d: dot }));
  }
  if (place.length < 4) return group;
  const frame = { x: left, y: top, width: Math.max(right - left, 0), height: Math.max(bottom - top, 0) };
  if (path) {
    const transform = `translate(${left} ${top}) scale(${frame.width} ${frame.height})`;
    group.append(drawn("path", { class: "outline", d: path, transform }));
  }
  const kind = path ? "box is-faint" : "box";
  group.append(drawn("rect", { class: `${kind} under`, ...frame }), drawn("rect", { class: kind, ...frame }));
  return group;
}

/** At the upper left corner, above the frame where there is room. */
function tagOf(picture, index, isFull, isChosen) {
  const { label, score, place } = picture.objects[index];
  const tag = element("span", { className: `tag is-${decisions.of(picture, index)}` }, String(index + 1));
  if (isFull) tag.append(" ", isolated(label), score === null ? "" : ` ${scoreText(score)}`);
  tag.classList.toggle("is-chosen", isChosen);
  tag.classList.toggle("is-inside", place[1] < 0.1);
  tag.classList.toggle("is-point", place.length === 2);
  tag.style.setProperty("--colour", colours.get(label));
  // Above the box; at the upper edge inside it, or below one that the tag would cover.
  const isSmall = place.length === 4 && place[3] - place[1] < 0.2;
  tag.style.top = `${(place[1] < 0.1 && isSmall ? place[3] : place[1]) * 100}%`;
  if (place[0] > 0.66) tag.style.right = `${Math.max(0, 1 - (place[2] ?? place[0])) * 100}%`;
  else tag.style.left = `${Math.max(0, place[0]) * 100}%`;
  return tag;
}

const SAID = { accepted: "Accepted", rejected: "Rejected", undecided: "Not decided" };
const SIGNS = { accepted: "M5 12.5l4.5 4.5L19 7", rejected: "M6 6l12 12M18 6L6 18" };

const icon = (d) => drawn("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, drawn("path", { d }));
const sign = (decision) => icon(SIGNS[decision]);

/** Two buttons; pressing the one that holds takes the decision back. `fill` shows what holds. */
function decisionButtons(about, words, onDecide) {
  const made = ["accepted", "rejected"].map((decision) => {
    const name = decision === "accepted" ? "Accept" : "Reject";
    const button = element("button", { type: "button", className: `decide is-${decision}`, title: name });
    button.append(sign(decision));
    if (words) button.append(` ${words[decision]}`);
    button.setAttribute("aria-label", `${name} ${about}`);
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      onDecide(button.ariaPressed === "true" ? UNDECIDED : decision);
    });
    return [decision, button];
  });
  const fill = (holds) => {
    for (const [decision, button] of made) button.ariaPressed = String(decision === holds);
  };
  return { box: element("span", { className: "decide-pair" }, ...made.map(([, button]) => button)), fill };
}
