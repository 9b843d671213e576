/** What was found as COCO, the way `kestrel label` writes it: one picture, a category for each name, all in pixels. */

import { drawn } from "./dom.js";

const DECIMALS = 100;
const PATH_UNITS = 10_000; // browsers measure a path of size 1 coarsely
const STEP_PX = 1.5;
const ROUND_PX = 0.1;
const PATH_PIECES = /[a-z]|[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?/gi;

/** Pixels are those of the visitor's file, also where a smaller copy was sent. */
export function cocoOf({ form, call, response }) {
  const { width, height } = form.picture.shrunkFrom ?? form.picture;
  const size = { width, height };
  const found = response.points ?? response.objects ?? response.segments ?? [];
  const names = [...new Set([call.body.object, found.map(({ label }) => label ?? [])].flat(2))];
  const shapes = found.map((one) => ({ one, shape: shapeOf(one, size) })).filter(({ shape }) => shape !== null);
  const annotations = shapes.map(({ one, shape }, index) => ({
    id: index + 1,
    image_id: 1,
    category_id: 1 + Math.max(0, names.indexOf(one.label)),
    ...shape,
    iscrowd: 0,
    ...(one.score !== undefined && { score: one.score }),
  }));
  const keypoints = response.points ? { keypoints: ["point"], skeleton: [] } : {};
  return {
    info: { description: "found by Kestrel" },
    licenses: [],
    images: [{ id: 1, file_name: form.picture.name, ...size }],
    annotations,
    categories: names.map((name, index) => ({ id: index + 1, name, ...keypoints })),
  };
}

const rounded = (value) => Math.round(value * DECIMALS) / DECIMALS;
const within = (share, length) => rounded(Math.min(Math.max(share, 0), 1) * length);

/** Null for a box without area, and where there is no box. */
function shapeOf(one, { width, height }) {
  if (one.x !== undefined) {
    const [x, y] = [within(one.x, width), within(one.y, height)];
    return { bbox: [x, y, 0, 0], area: 0, segmentation: [], keypoints: [x, y, 2], num_keypoints: 1 };
  }
  const box = one.bbox === undefined ? one : one.bbox;
  if (box === null) return null;
  const [left, top] = [within(box.x_min, width), within(box.y_min, height)];
  const [across, down] = [rounded(within(box.x_max, width) - left), rounded(within(box.y_max, height) - top)];
  if (across <= 0 || down <= 0) return null;
  const loops = one.svg_path ? loopsOf(one.svg_path, box, { width, height }) : [];
  const area = loops.length > 0 ? loops.reduce((sum, loop) => sum + Math.abs(areaOf(loop)), 0) : across * down;
  return { bbox: [left, top, across, down], area: rounded(area), segmentation: loops.map((loop) => loop.flat()) };
}

/** The parts of an outline as polygons. Those inside another that run the other way are holes, and filled. */
function loopsOf(path, box, { width, height }) {
  const [across, down] = [(box.x_max - box.x_min) * width, (box.y_max - box.y_min) * height];
  const place = ({ x, y }) => [
    within(box.x_min + (x / PATH_UNITS) * (box.x_max - box.x_min), width),
    within(box.y_min + (y / PATH_UNITS) * (box.y_max - box.y_min), height),
  ];
  const line = drawn("path", { d: enlarged(path) });
  const step = (PATH_UNITS * STEP_PX) / Math.max(across, down, 1);
  const loops = [];
  let last = null;
  for (let at = 0; at <= line.getTotalLength(); at += step) {
    const point = line.getPointAtLength(at);
    if (last === null || Math.hypot(point.x - last.x, point.y - last.y) > 1.5 * step) loops.push([]);
    loops.at(-1).push(place(point));
    last = point;
  }
  const whole = loops.map(withoutStraight).filter((loop) => loop.length > 2 && areaOf(loop) !== 0);
  const isHole = (loop) => whole.some((other) => areaOf(loop) * areaOf(other) < 0 && holds(other, loop[0]));
  return whole.filter((loop) => !isHole(loop));
}

/** Every number of a path times PATH_UNITS, but for the angle and the flags of arcs. */
function enlarged(path) {
  let [command, count] = ["", 0];
  return (path.match(PATH_PIECES) ?? [])
    .map((piece) => {
      if (/^[a-z]$/i.test(piece)) return ([command, count] = [piece, 0])[0];
      const isLength = !(/a/i.test(command) && [2, 3, 4].includes(count++ % 7));
      return isLength ? Number(piece) * PATH_UNITS : piece;
    })
    .join(" ");
}

/** Without points that lie on the line between their neighbours. */
function withoutStraight(loop) {
  const kept = [];
  for (const [index, point] of loop.entries()) {
    const [before, after] = [kept.at(-1), loop[index + 1]];
    if (!before || !after || distance(point, before, after) > ROUND_PX) kept.push(point);
  }
  return kept;
}

function distance([x, y], [fromX, fromY], [toX, toY]) {
  const length = Math.hypot(toX - fromX, toY - fromY);
  const cross = (toX - fromX) * (y - fromY) - (toY - fromY) * (x - fromX);
  return length === 0 ? Math.hypot(x - fromX, y - fromY) : Math.abs(cross) / length;
}

/** Whether a ray to the right of the point crosses the loop an odd number of times. */
function holds(loop, [x, y]) {
  const crossed = loop.filter(([fromX, fromY], index) => {
    const [toX, toY] = loop[(index + 1) % loop.length];
    return fromY > y !== toY > y && x < fromX + ((y - fromY) * (toX - fromX)) / (toY - fromY);
  });
  return crossed.length % 2 === 1;
}

function areaOf(loop) {
  const sides = loop.map(([x, y], index) => {
    const [nextX, nextY] = loop[(index + 1) % loop.length];
    return x * nextY - nextX * y;
  });
  return sides.reduce((sum, side) => sum + side, 0) / 2;
}
