/** The picture with what is drawn over it, as a PNG. */

const DRAWN_AS = ["display", "fill", "fill-opacity", "opacity", "paint-order", "stroke", "stroke-dasharray"];
const TEXT_AS = ["font-family", "font-size", "font-weight"];

/** As seen on the screen, hidden layers left out. A small picture is made larger, so that labels can be read. */
export async function snapshotOf(picture, svg) {
  const unit = picture.width / svg.getBoundingClientRect().width; // pixels of the picture for one of the screen
  const scale = Math.max(1, Math.round(1 / unit));
  const [width, height] = [picture.width * scale, picture.height * scale];
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.drawImage(await loaded(picture.url), 0, 0, width, height);
  pen.drawImage(await loaded(addressOf(svg, { width, height, strokeScale: unit * scale })), 0, 0, width, height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

async function loaded(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  return image;
}

/** A picture of its own knows no stylesheet: what the sheet says is written to the nodes. */
function addressOf(svg, { width, height, strokeScale }) {
  const copy = svg.cloneNode(true);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const copies = copy.querySelectorAll("*");
  svg.querySelectorAll("*").forEach((node, index) => {
    const style = getComputedStyle(node);
    const isFixed = style.vectorEffect === "non-scaling-stroke";
    const names = node.tagName === "text" ? [...DRAWN_AS, ...TEXT_AS] : DRAWN_AS;
    for (const name of names) copies[index].setAttribute(name, style.getPropertyValue(name));
    copies[index].setAttribute("stroke-width", parseFloat(style.strokeWidth) * (isFixed ? strokeScale : 1));
    copies[index].setAttribute("vector-effect", style.vectorEffect);
  });
  return `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
}
