/** What the page can ask for: one row per skill, and the request it makes of the form. */

const STAND_IN = /^\0picture (\d+)\0$/;
/** Stands for a picture's data URL in a body until it is sent or shown. */
const standIn = (index) => `\0picture ${index}\0`;
/** Which picture of the call a value stands for; undefined for other values. */
export const pictureAt = (value) => (typeof value === "string" ? STAND_IN.exec(value)?.[1] : undefined);

const SEVERAL = "Commas separate several names; \\, is a comma in a name.";

export const SKILLS = [
  {
    name: "query",
    title: "Query",
    path: "v1/query",
    field: "question",
    label: "Question",
    hint: "Ask about the picture, or without one. Marked places are what the question is about.",
    placeholder: "What is in this picture?",
    action: "Ask",
    takesMarks: true,
    takesReasoning: true,
    bound: "max_tokens",
    needsPicture: false,
  },
  {
    name: "caption",
    title: "Caption",
    path: "v1/caption",
    field: null,
    label: "",
    hint: "Describe the picture in words.",
    placeholder: "",
    action: "Describe",
    takesLength: true,
    bound: "max_tokens",
    needsPicture: true,
  },
  {
    name: "point",
    title: "Point",
    path: "v1/point",
    field: "object",
    label: "What to point at",
    hint: `Put a point on every one of something. Marked places say which you mean. ${SEVERAL}`,
    placeholder: "person, dog",
    action: "Point",
    takesMarks: true,
    bound: "max_objects",
    needsPicture: true,
  },
  {
    name: "detect",
    title: "Detect",
    path: "v1/detect",
    field: "object",
    label: "What to box",
    hint: `Draw a box around every one of something. ${SEVERAL}`,
    placeholder: "car, bicycle",
    action: "Detect",
    bound: "max_objects",
    needsPicture: true,
  },
  {
    name: "segment",
    title: "Segment",
    path: "v1/segment",
    field: "object",
    label: "What to outline",
    hint: `Outline one object of each name. Marked places say which one you mean. ${SEVERAL}`,
    placeholder: "dog, ball",
    action: "Segment",
    takesMarks: true,
    bound: "max_tokens",
    needsPicture: true,
  },
  {
    name: "chat",
    title: "Chat",
    path: "v1/chat/completions",
    field: "message",
    label: "Message",
    hint: "Talk about the picture: earlier turns are remembered.",
    placeholder: "Say something about the picture",
    action: "Send",
    bound: "max_tokens",
    needsPicture: false,
    forText: {
      hint: "Talk with the model: earlier turns are remembered.",
      placeholder: "Say something",
      takesReasoning: true,
      takesSystem: true,
    },
  },
  {
    name: "complete",
    title: "Complete",
    path: "v1/completions",
    field: "prompt",
    label: "Text to continue",
    hint: "Continue a text as it is: no template is added.",
    placeholder: "Once upon a time",
    action: "Continue",
    keepsBlanks: true,
    bound: "max_tokens",
    needsPicture: false,
    forText: {},
  },
];

export const LENGTHS = ["short", "normal", "long"];
export const SETTINGS = ["temperature", "top_p", "max_tokens", "max_objects", "seed"];

/** The skills that a model's page shows, as they are there: `forText` is what is different for a text model. */
export const skillsFor = (readsPictures) =>
  readsPictures
    ? SKILLS.filter(({ name }) => name !== "complete")
    : SKILLS.filter(({ forText }) => forText).map((skill) => ({ ...skill, ...skill.forText }));

export const skillNamed = (name) => SKILLS.find((skill) => skill.name === name);

/** What stands between commas; a backslash before a comma makes it part of a name. The command line splits alike. */
export const namesOf = (text) => text.split(/(?<!\\),/).map((part) => part.replaceAll("\\,", ",").trim());

/** Settings that a skill takes: it is bounded by tokens or by objects. */
export const settingsOf = (skill) =>
  SETTINGS.filter((name) => !["max_tokens", "max_objects"].includes(name) || name === skill.bound);

/** The call that a filled-in form stands for: where to send what. */
export function callOf(form) {
  const skill = skillNamed(form.skill);
  const settings = Object.fromEntries(
    settingsOf(skill)
      .filter((name) => form.settings[name] !== undefined)
      .map((name) => [name, form.settings[name]]),
  );
  const pictures = []; // in their order in the body
  const use = (picture) => standIn(pictures.push(picture) - 1);
  const body = (BODIES[skill.name] ?? nativeBody)(form, settings, { skill, use });
  return { skill: skill.name, path: skill.path, body, pictures };
}

function nativeBody(form, settings, { skill, use }) {
  const body = {};
  if (form.picture) body.image_url = use(form.picture);
  if (skill.field) body[skill.field] = skill.field === "object" ? objectOf(form.text) : form.text;
  if (skill.takesLength) body.length = form.length;
  if (skill.takesReasoning) body.reasoning = form.reasoning ?? false;
  if (skill.takesMarks && form.marks.length > 0) body.spatial_refs = form.marks;
  const all = form.adapter ? { ...settings, adapter: form.adapter } : settings;
  if (Object.keys(all).length > 0) body.settings = all;
  if (form.streaming) body.stream = true;
  return body;
}

function objectOf(text) {
  const names = namesOf(text);
  return names.length > 1 ? names : names[0];
}

/** The picture belongs to the first turn, so that every turn of the conversation shares it. */
function chatBody(form, settings, { use }) {
  const turns = [...form.turns, { role: "user", content: form.text, pictures: form.attached }];
  const messages = turns.map(({ role, content, pictures = [] }, index) => {
    const all = form.picture && index === 0 ? [form.picture, ...pictures] : pictures;
    const parts = all.map((picture) => ({ type: "image_url", image_url: { url: use(picture) } }));
    return { role, content: parts.length > 0 ? [...parts, { type: "text", text: content }] : content };
  });
  if (form.system) messages.unshift({ role: "system", content: form.system });
  const body = { messages, ...settings };
  if (form.reasoning !== null) body.reasoning = form.reasoning;
  return inDialect(body, form);
}

/** The route would take 16 tokens for a limit that is not given. */
const completeBody = (form, settings) =>
  inDialect({ prompt: form.text, max_tokens: form.defaults?.max_tokens, ...settings }, form);

const BODIES = { chat: chatBody, complete: completeBody };

function inDialect(body, { model, adapter, streaming }) {
  if (model) body.model = adapter ? `${model}/${adapter}` : model;
  if (streaming) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  return body;
}

/** The same body with every stand-in for a picture replaced. */
export function withPictures(body, dataUrls) {
  const index = pictureAt(body);
  if (index !== undefined) return dataUrls[index];
  if (Array.isArray(body)) return body.map((item) => withPictures(item, dataUrls));
  if (body === null || typeof body !== "object") return body;
  return Object.fromEntries(Object.entries(body).map(([name, value]) => [name, withPictures(value, dataUrls)]));
}
