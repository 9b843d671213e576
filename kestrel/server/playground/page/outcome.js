/** What an answer says, in one shape for all skills, while it streams in and when it is whole. */

const COLOURS = ["#ff4d54", "#2694f0", "#ffbe20", "#24be78", "#a85cec", "#ff7e30", "#18bcc8", "#f05caa"];
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
      outcome.masks = [...(outcome.masks ?? []), outlineBegun(event)];
      break;
    case "path_delta":
      outcome.masks = outcome.masks.map((mask) =>
        mask.index === event.index ? { ...mask, path: mask.path + event.chunk } : mask,
      );
      break;
  }
  return outcome;
}

/** Where there may be several, events tell which one they are of. */
const outlineBegun = ({ bbox, label, index }) => ({ bbox, path: "", label, index });

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
    outcome.masks = body.segments
      .filter(({ bbox }) => bbox)
      .map(({ bbox, svg_path: path, label, score }) => ({ bbox, path, label, score }));
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

/** What is drawn for it: shapes with an id, a kind, a colour, a number, a name (`label` where the answer has none) and
 * a score, null where there is none. */
export function shapesOf(outcome, label) {
  const numbered = (items, kind, geometry) =>
    (items ?? []).map((item, index) => ({
      id: `${kind}-${index}`,
      kind,
      number: index + 1,
      label: item.label ?? label,
      score: item.score ?? null,
      colour: colourAt(index),
      ...geometry(item, index),
    }));
  return [
    ...numbered(outcome.masks, "mask", ({ bbox, path }, index) => ({ box: bbox, path, colour: colourAt(index + 1) })),
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
