/** One call from its first byte to its last: the entry it belongs to is filled in as the answer comes. */

import { cutOff, post } from "./api.js";
import { joinedChat, outcomeOf, take } from "./outcome.js";
import { withPicture } from "./skills.js";

/** Sets the entry's outcome, response and what the browser saw of the time. Throws what went wrong. */
export async function perform(entry, { key, signal, onProgress }) {
  const { call, form } = entry;
  const body = withPicture(call.body, call.picture && (await call.picture.dataUrl()));
  const beganMs = performance.now();
  const events = [];
  entry.seen = {};
  onProgress();
  const answer = await post(call.path, body, {
    key,
    signal,
    onEvent: (event) => {
      entry.seen.firstMs ??= performance.now() - beganMs;
      events.push(event);
      take(entry.outcome, event);
      onProgress();
    },
  });
  entry.seen.totalMs = performance.now() - beganMs;
  const isChat = form.skill === "chat";
  if (form.streaming && !isChat && !answer.completed) throw cutOff(answer.request_id);
  entry.response = isChat && events.length > 0 ? joinedChat(events) : answer;
  entry.outcome = outcomeOf(entry.response);
}
