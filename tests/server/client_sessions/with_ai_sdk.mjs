// What the AI SDK gets: text, streams and objects about a picture, and tool loops, over both of OpenAI's APIs.
//
// Reads {"pictures", "texts", "image"} from standard input and prints one JSON object. The text model says what the test
// has it say: for each API a call and then an object.

import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const given = JSON.parse(readFileSync(0, "utf8"));
const pictures = createOpenAI({ baseURL: `${given.pictures}/v1`, apiKey: "none" });
const texts = createOpenAI({ baseURL: `${given.texts}/v1`, apiKey: "none" });
const how = { temperature: 0, maxRetries: 0 };
const schema = z.object({ count: z.number().int().min(0).max(9) });
const image = { type: "image", image: readFileSync(given.image) };
const messages = [{ role: "user", content: [{ type: "text", text: "How many bees are there?" }, image] }];

async function aboutAPicture(model) {
  const streamed = streamText({ model, prompt: "Who are you?", ...how });
  const pieces = [];
  for await (const piece of streamed.textStream) pieces.push(piece);
  return {
    text: (await generateText({ model, messages, ...how })).text,
    object: (await generateObject({ model, messages, schema, ...how })).object,
    output: (await generateText({ model, messages, output: Output.object({ schema }), ...how })).output,
    pieces,
    num_tokens: (await streamed.usage).outputTokens,
    reason: await streamed.finishReason,
  };
}

async function withTools(model) {
  const inputSchema = z.object({ city: z.string() });
  const get_weather = tool({ description: "Weather now", inputSchema, execute: ({ city }) => `18 degrees in ${city}` });
  const loop = { prompt: "Is Rome warm?", tools: { get_weather }, stopWhen: isStepCount(3), ...how };
  const answer = await generateText({ model, output: Output.object({ schema }), ...loop });
  return [...answer.steps.flatMap((step) => step.toolResults.map((result) => result.output)), answer.output];
}

console.log(
  JSON.stringify({
    pictures: {
      chat: await aboutAPicture(pictures.chat("kestrel-tiny")),
      responses: await aboutAPicture(pictures.responses("kestrel-tiny")),
    },
    tools: {
      chat: await withTools(texts.chat("tiny-llama")),
      responses: await withTools(texts.responses("tiny-llama")),
    },
  }),
);
