/** Server-Sent Events from a response body: each `data:` as JSON. Comments and the end mark are passed over. */

const END_MARK = "[DONE]";

export async function* eventsOf(body) {
  for await (const block of blocksOf(body)) {
    const data = block
      .split(/\r?\n/)
      .filter((line) => line.startsWith("data:"))
      .map((line) => line.slice(line.startsWith("data: ") ? 6 : 5))
      .join("\n");
    if (data !== "" && data !== END_MARK) yield JSON.parse(data);
  }
}

/** Stretches of text between empty lines, however the network cut them. */
async function* blocksOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      waiting += value;
      const blocks = waiting.split(/\r?\n\r?\n/);
      waiting = blocks.pop();
      yield* blocks;
    }
    if (waiting.trim() !== "") yield waiting;
  } finally {
    reader.releaseLock();
  }
}
