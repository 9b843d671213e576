/** What an answer says, in one shape for all skills, while it streams in and when it is whole. */

const COLOURS = ["#ff4d54", "#2694f0", "#ffbe20", "#24be78", "#a85cec", "#ff7e30", "#18bcc8", "#f05caa"];
const MASK_COLOUR = COLOURS[1];
const colourAt = (index) => COLOURS[index % COLOURS.length];

export const emptyOutcome = () => ({
  text: null,
  reasoning: null,
  points: null,
  objects: null,
  masks: null,
  metrics: null,
  finishReason: null,
});

/** Adds one event of a stream. */
export function take(outcome, event) {
  if (event.choices) return takeChat(outcome, event);
  if (event.completed) return Object.assign(outcome, outcomeOf(event));
  switch (event.type) {
    case undefined:
      outcome.text = (outcome.text ?? "") + event.chunk;
      break;
    case "reasoning":
      outcome.reasoning = withThought(outcome.reasoning, event);
      break;
    case "point":
      outcome.points = [...(outcome.points ?? []), event.point];
      break;
    case "object":
      outcome.objects = [...(outcome.objects ?? []), event.object];
      break;
    case "bbox":
      outcome.masks = [{ bbox: event.bbox, path: "" }];
      break;
    case "path_delta":
      outcome.masks = [{ bbox: outcome.masks[0].bbox, path: outcome.masks[0].path + event.chunk }];
      break;
  }
  return outcome;
}

/** A piece of thinking, and the point that came with it: points of one beginning belong together. */
function withThought(reasoning, { reasoning: piece, grounding: ground }) {
  const { text, grounding } = reasoning ?? { text: "", grounding: [] };
  const others = grounding.filter(({ start_idx: start }) => start !== ground?.start_idx);
  const before = grounding.find(({ start_idx: start }) => start === ground?.start_idx)?.points ?? [];
  return {
    text: text + piece,
    grounding: ground ? [...others, { ...ground, points: [...before, ...ground.points] }] : grounding,
  };
}

function takeChat(outcome, event) {
  const [choice] = event.choices;
  outcome.text = (outcome.text ?? "") + (choice?.delta?.content ?? choice?.text ?? "");
  const thought = choice?.delta?.reasoning_content;
  if (thought) outcome.reasoning = { text: (outcome.reasoning?.text ?? "") + thought, grounding: [] };
  outcome.finishReason = choice?.finish_reason ?? outcome.finishReason;
  if (event.usage) outcome.metrics = chatMetrics(event.usage);
  return outcome;
}

/** The outcome of a whole answer. */
export function outcomeOf(body) {
  const outcome = emptyOutcome();
  if (body.choices) {
    const { message, text, finish_reason: finishReason } = body.choices[0];
    outcome.text = message?.content ?? text;
    if (message?.reasoning_content) outcome.reasoning = { text: message.reasoning_content, grounding: [] };
    outcome.finishReason = finishReason;
    outcome.metrics = chatMetrics(body.usage ?? {});
    return outcome;
  }
  outcome.text = body.answer ?? body.caption ?? null;
  outcome.reasoning = body.reasoning ?? null;
  outcome.points = body.points ?? null;
  outcome.objects = body.objects ?? null;
  if (body.segments)
    outcome.masks = body.segments.filter((s) => s.bbox).map((s) => ({ bbox: s.bbox, path: s.svg_path }));
  outcome.metrics = { ...body.metrics, tokens_per_s: body.decode_tokens_per_s };
  outcome.finishReason = body.finish_reason;
  return outcome;
}

/** The whole answer that the events of a chat or completion make together. */
export function joinedChat(events) {
  const isChat = events[0].object === "chat.completion.chunk";
  const joined = { ...events[0], object: isChat ? "chat.completion" : events[0].object };
  const { text, reasoning, finishReason } = events.reduce(take, emptyOutcome());
  const message = { role: "assistant", content: text, ...(reasoning && { reasoning_content: reasoning.text }) };
  joined.choices = [{ index: 0, ...(isChat ? { message } : { text }), finish_reason: finishReason }];
  joined.usage = events.findLast((event) => event.usage)?.usage ?? null;
  return joined;
}

const chatMetrics = (usage) => ({
  input_tokens: usage.prompt_tokens,
  output_tokens: usage.completion_tokens,
  cached_tokens: usage.prompt_tokens_details?.cached_tokens,
});

/** What is drawn for it: shapes with an id, a kind, a colour, a number and the name they go by. */
export function shapesOf(outcome, label) {
  const numbered = (items, kind, geometry) =>
    (items ?? []).map((item, index) => ({
      id: `${kind}-${index}`,
      kind,
      number: index + 1,
      label,
      colour: colourAt(index),
      ...geometry(item),
    }));
  return [
    ...numbered(outcome.masks, "mask", (mask) => ({ box: mask.bbox, path: mask.path, colour: MASK_COLOUR })),
    ...numbered(outcome.objects, "box", (box) => ({ box })),
    ...numbered(outcome.points, "point", (point) => ({ point })),
  ];
}

/** The places that thinking points at; one id per stretch of text. */
export function groundedShapes(reasoning) {
  return (reasoning?.grounding ?? []).flatMap((ground, index) =>
    ground.points.map(([x, y]) => ({
      id: `thought-${index}`,
      kind: "point",
      number: index + 1,
      label: "",
      colour: colourAt(index),
      point: { x, y },
    })),
  );
}

/** A line that stands for the whole outcome, in lists and for screen readers. */
export function summaryOf(outcome) {
  const count = (items, one, many) => (items.length === 1 ? `1 ${one}` : `${items.length} ${many}`);
  if (outcome.points) return outcome.points.length ? count(outcome.points, "point", "points") : "nothing found";
  if (outcome.objects) return outcome.objects.length ? count(outcome.objects, "box", "boxes") : "nothing found";
  if (outcome.masks) return outcome.masks.length ? count(outcome.masks, "outline", "outlines") : "nothing found";
  return outcome.text?.trim() || "an empty answer";
}
