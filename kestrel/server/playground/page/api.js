/** Calls to the server that this page came from: JSON, streams of events, and failures as one kind of error. */

import { eventsOf } from "./sse.js";

export const ROOT = new URL(".", document.baseURI);

const REMEDIES = {
  401: ["The key is missing or wrong", "Enter an API key of this server."],
  404: ["This server does not offer that", "Choose another skill, or update the server."],
  408: ["It took too long", "Try again, with a smaller picture or a shorter answer."],
  413: ["The request is too large", "Shorten the text, or use a smaller picture."],
  429: ["Too many requests at once", "Wait for the others to finish, then try again."],
  503: ["The server is busy or starting", "Try again in a moment."],
};
/** What a failure in the middle of a stream would have had for a status. */
const STATUS_OF_TYPE = { invalid_request_error: 400, timeout_error: 408, overloaded_error: 503 };
const FALLBACK = {
  client: ["The request was refused", "Change what the message names, then run it again."],
  server: ["The server failed", "Try again; its log has the details under the request id."],
};

export class CallError extends Error {
  constructor({ title, message, remedy, status = 0, requestId = null, body = null }) {
    super(message);
    Object.assign(this, { title, remedy, status, requestId, body });
  }
}

export async function fetchJson(path, key = "") {
  const response = await reach(path, { headers: authorization(key) });
  if (!response.ok) throw await failureOf(response);
  return response.json();
}

export async function fetchBlob(address) {
  const response = await reach(address, {});
  if (!response.ok) throw await failureOf(response);
  return response.blob();
}

/** Posts a body and gives the whole answer. Events of a stream go to `onEvent` as they come, the last one too. */
export async function post(path, body, { key, signal, onEvent }) {
  const headers = { "content-type": "application/json", ...authorization(key) };
  const response = await reach(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await failureOf(response);
  if (!response.headers.get("content-type").startsWith("text/event-stream")) return response.json();
  const requestId = response.headers.get("x-request-id");
  let last = null;
  for await (const event of eventsOf(response.body)) {
    if (event.error) throw described(STATUS_OF_TYPE[event.error.type] ?? 500, event, requestId);
    onEvent(event);
    last = event;
  }
  if (last === null) throw cutOff(requestId);
  return last;
}

const authorization = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function reach(path, options) {
  try {
    return await fetch(new URL(path, ROOT), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError({
      title: "The server cannot be reached",
      message: `No answer from ${ROOT.host}.`,
      remedy: "Check that it is running and that you are connected, then try again.",
    });
  }
}

async function failureOf(response) {
  const requestId = response.headers.get("x-request-id");
  const text = await response.text();
  try {
    return described(response.status, JSON.parse(text), requestId);
  } catch {
    return described(response.status, { error: { message: `Status ${response.status}.` } }, requestId);
  }
}

function described(status, body, requestId) {
  const [title, remedy] = REMEDIES[status] ?? FALLBACK[status < 500 ? "client" : "server"];
  return new CallError({
    title,
    remedy,
    status,
    requestId,
    body,
    message: body.error?.message ?? "No reason was given.",
  });
}

export function cutOff(requestId) {
  return new CallError({
    title: "The answer was cut off",
    message: "The stream ended before its last event.",
    remedy: "Try again; if it happens often, look at the proxy between this page and the server.",
    requestId,
  });
}
