// A chat with a text model, streamed, with the openai package for Node.
//
//   npm install openai
//   kestrel serve --model HuggingFaceTB/SmolLM2-135M-Instruct
//   node examples/chat.mjs "What is a kestrel?" "And what does it eat?"
//
// KESTREL_URL and KESTREL_API_KEY name another server and its key.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: `${process.env.KESTREL_URL ?? "http://127.0.0.1:8080"}/v1`,
  apiKey: process.env.KESTREL_API_KEY ?? "none",
});
const { data: models } = await client.models.list();
const messages = [{ role: "system", content: "Be brief." }];

for (const question of process.argv.slice(2)) {
  messages.push({ role: "user", content: question });
  const stream = await client.chat.completions.create({
    model: models[0].id,
    messages,
    max_tokens: 100,
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  });
  let answer = "";
  for await (const { choices, usage } of stream) {
    const text = choices[0]?.delta.content ?? "";
    process.stdout.write(text);
    answer += text;
    if (usage) {
      const { cached_tokens: cached } = usage.prompt_tokens_details;
      console.log(`\n(${usage.prompt_tokens} tokens of prompt, ${cached} of them cached)`);
    }
  }
  messages.push({ role: "assistant", content: answer });
}
