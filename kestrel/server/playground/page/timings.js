/** Where the time of an answer went, by the server's own clock where it says so. */

import { byId, element } from "./dom.js";

const MOST_IN_A_ROW = 4; // more stand in two rows of about one length

/** `seen` holds what the browser measured: until the first piece arrived, and in all. */
export function showTimings(metrics, seen) {
  const rows = metrics === null ? [] : rowsOf(metrics, seen);
  byId("timings").hidden = rows.length === 0;
  byId("timings").style.setProperty("--columns", Math.ceil(rows.length / (rows.length > MOST_IN_A_ROW ? 2 : 1)));
  byId("timings").replaceChildren(
    ...rows.map(([name, value, title]) => element("div", { title }, element("dt", {}, name), element("dd", {}, value))),
  );
}

function rowsOf(metrics, seen) {
  const tokens = metrics.cached_tokens === undefined ? null : `${metrics.cached_tokens} of ${metrics.input_tokens}`;
  return [
    ["Queue", ms(metrics.queue_time_ms), "Waiting for its turn"],
    ["Prefill", ms(metrics.prefill_time_ms), "Reading the picture and the words"],
    ["First token", ms(metrics.ttft_ms ?? seen?.firstMs), "Until the first token, from the call"],
    ["Speed", speed(metrics.tokens_per_s ?? seenSpeed(metrics, seen)), "Tokens per second after the first"],
    ["Cached", tokens, "Tokens of the input that were computed before"],
    ["Output", metrics.output_tokens === undefined ? null : `${metrics.output_tokens} tok`, "Tokens of the answer"],
    ["In all", ms(seen?.totalMs), "From this browser and back"],
  ].filter(([, value]) => value !== null);
}

/** Of streams that do not say it. In a short time pieces arrive together, which tells nothing. */
function seenSpeed({ output_tokens: tokens }, seen) {
  const tookMs = seen?.lastMs - seen?.firstMs;
  return tookMs > 100 ? (1000 * (tokens - 1)) / tookMs : undefined;
}

/** An answer of one token has none. */
function speed(tokensPerSecond) {
  if (tokensPerSecond === undefined) return null;
  return tokensPerSecond ? `${tokensPerSecond.toFixed(0)} tok/s` : "–";
}

function ms(value) {
  if (value === undefined || value === null) return null;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return value >= 10 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
}
