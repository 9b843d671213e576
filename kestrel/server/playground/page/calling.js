/** One call from its first byte to its last: the entry it belongs to is filled in as the answer comes. */

import { cutOff, post } from "./api.js";
import { joinedChat, outcomeOf, take } from "./outcome.js";
import { withPictures } from "./skills.js";

/** Sets the entry's outcome, response and what the browser saw of the time. Throws what went wrong. */
export async function perform(entry, { key, signal, onProgress }) {
  const { call, form } = entry;
  const body = withPictures(call.body, await Promise.all(call.pictures.map((picture) => picture.dataUrl())));
  const beganMs = performance.now();
  const events = [];
  entry.seen = {};
  onProgress();
  const answer = await post(call.path, body, {
    key,
    signal,
    onEvent: (event) => {
      entry.seen.lastMs = performance.now() - beganMs;
      entry.seen.firstMs ??= entry.seen.lastMs;
      events.push(event);
      take(entry.outcome, event);
      onProgress();
    },
  });
  entry.seen.totalMs = performance.now() - beganMs;
  const isDialect = Boolean(answer.choices);
  const isWhole = isDialect ? entry.outcome.finishReason !== null : answer.completed;
  if (form.streaming && !isWhole) throw cutOff(answer.request_id);
  entry.response = isDialect && events.length > 0 ? joinedChat(events) : answer;
  entry.outcome = outcomeOf(entry.response);
}
