/** A picture that the visitor brought: its file, its size, and a smaller copy where the server would refuse it. */

import { CallError } from "./api.js";

const BODY_MARGIN_BYTES = 16 * 1024;
const SHRINK_QUALITY = 0.9;
const SMALLEST_SIDE = 32;

export class Picture {
  constructor(blob, { name, width, height, source = null, shrunkFrom = null }) {
    Object.assign(this, { blob, name, width, height, source, shrunkFrom });
    this.url = URL.createObjectURL(blob);
  }

  get mediaType() {
    return this.blob.type || "application/octet-stream";
  }

  dataUrl() {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(unreadable(this.name));
      reader.readAsDataURL(this.blob);
    });
  }
}

/** Largest picture file that fits into a request body as base64, with room for the other fields. */
export function largestPictureBytes({ max_body_bytes, max_image_bytes = Infinity }) {
  const inBody = Math.floor((Math.max(max_body_bytes - BODY_MARGIN_BYTES, 1024) * 3) / 4);
  return Math.min(inBody, max_image_bytes);
}

/** `source` is the address of a sample, so that copied code can fetch it. */
export async function pictureOf(blob, name, { maxBytes, source = null }) {
  const image = await decoded(blob, name);
  const { naturalWidth: width, naturalHeight: height } = image;
  if (blob.size <= maxBytes) return new Picture(blob, { name, width, height, source });
  const smaller = await shrunk(image, blob.size, maxBytes);
  if (smaller === null) throw tooLarge(name, maxBytes);
  const shrunkFrom = { width, height, bytes: blob.size };
  return new Picture(smaller.blob, { name, width: smaller.width, height: smaller.height, source, shrunkFrom });
}

async function decoded(blob, name) {
  const image = new Image();
  const url = URL.createObjectURL(blob);
  try {
    image.src = url;
    await image.decode();
    if (image.naturalWidth === 0) throw unreadable(name);
    return image;
  } catch {
    throw unreadable(name);
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** As large as fits: each try takes the size that the last one suggests. */
async function shrunk(image, bytes, maxBytes) {
  let scale = Math.min(1, Math.sqrt(maxBytes / bytes) * 1.2);
  for (;;) {
    const [width, height] = [image.naturalWidth, image.naturalHeight].map((side) =>
      Math.max(1, Math.round(side * scale)),
    );
    if (Math.max(width, height) < SMALLEST_SIDE) return null;
    const blob = await jpegOf(image, width, height);
    if (blob.size <= maxBytes) return { blob, width, height };
    scale *= Math.min(0.9, Math.sqrt(maxBytes / blob.size));
  }
}

function jpegOf(image, width, height) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, width, height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(image, 0, 0, width, height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", SHRINK_QUALITY));
}

export function shownBytes(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1e6 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

const unreadable = (name) =>
  new CallError({
    title: "This file cannot be shown",
    message: `The browser cannot read ${name} as a picture.`,
    remedy: "Use a PNG, JPEG, WebP, GIF or BMP file.",
  });

const tooLarge = (name, maxBytes) =>
  new CallError({
    title: "This picture is too large",
    message: `${name} does not fit into the ${shownBytes(maxBytes)} that are left for it, not even made smaller.`,
    remedy: "Ask the operator for a larger limit (max_body_bytes).",
  });
