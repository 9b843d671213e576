/** Finished calls on the visitor's own disk (IndexedDB), so that a reload keeps them. Nothing is sent anywhere.
 *
 * Where the browser allows no storage, or has no room, nothing is kept and nothing fails.
 */

import { Picture } from "./picture.js";
import { callOf, skillNamed } from "./skills.js";

const DATABASE = "kestrel-playground";
const VERSION = 1; // another one forgets what was stored: raise it when entries change
const STORE = "history";
export const MOST_ENTRIES = 60;
const MOST_BYTES = 64 * 2 ** 20;
const PICTURE_MARK = "isPicture";

/** Adds an entry; the oldest make way. */
export const keep = (entry, mostBytes = MOST_BYTES) =>
  inStore("readwrite", (store) => {
    const { call, ...kept } = entry; // made again from the form
    const record = packed(kept);
    store.add({ bytes: bytesOf(record), record });
    let [count, bytes] = [0, 0];
    store.openCursor(null, "prev").onsuccess = ({ target: { result: cursor } }) => {
      if (cursor === null) return;
      count += 1;
      bytes += cursor.value.bytes;
      if (count > MOST_ENTRIES || bytes > mostBytes) cursor.delete();
      cursor.continue();
    };
  });

/** What was kept, newest first. */
export async function kept() {
  const found = (await inStore("readonly", (store) => store.getAll())) ?? [];
  const known = found.filter(({ record }) => skillNamed(record.form.skill)); // another release may have had others
  return known.reverse().map(({ record }) => {
    const entry = unpacked(record);
    return { ...entry, call: callOf(entry.form) };
  });
}

export const forgetAll = () => inStore("readwrite", (store) => store.clear());

async function inStore(mode, work) {
  try {
    const database = await opened();
    try {
      const change = database.transaction(STORE, mode);
      const request = work(change.objectStore(STORE));
      await new Promise((resolve, reject) => Object.assign(change, { oncomplete: resolve, onabort: reject }));
      return request?.result;
    } finally {
      database.close();
    }
  } catch {
    return null;
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, VERSION);
    request.onupgradeneeded = () => {
      for (const name of request.result.objectStoreNames) request.result.deleteObjectStore(name);
      request.result.createObjectStore(STORE, { autoIncrement: true });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = reject;
  });
}

/** Pictures and errors as plain values; a picture's file stays one. */
function packed(value) {
  if (value instanceof Picture) {
    const { url, ...fields } = value;
    return { [PICTURE_MARK]: true, ...fields };
  }
  if (value instanceof Error) return { ...value, message: value.message };
  return mapped(value, packed);
}

const unpacked = (value) => (value?.[PICTURE_MARK] ? revived(value) : mapped(value, unpacked));

/** Samples of another release have other addresses. */
function revived({ blob, source, ...fields }) {
  const isCurrent = source?.startsWith(String(new URL(".", import.meta.url)));
  return new Picture(blob, { ...fields, source: isCurrent ? source : null });
}

function mapped(value, change) {
  if (Array.isArray(value)) return value.map(change);
  if (value?.constructor !== Object) return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, change(item)]));
}

function bytesOf(value) {
  if (value instanceof Blob) return value.size;
  if (typeof value === "string") return 2 * value.length;
  if (value === null || typeof value !== "object") return 8;
  return Object.values(value).reduce((sum, item) => sum + bytesOf(item), 0);
}
