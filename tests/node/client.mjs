// Make one call with the OpenAI Node SDK and report what a customer's program would see of it.
// Reads a JSON command on stdin: {baseURL, apiKey, maxRetries, call, body}.
// Writes a JSON report on stdout: what the call returned, or the error and its classes.

import { text } from "node:stream/consumers";
import OpenAI from "openai";

const command = JSON.parse(await text(process.stdin));
const report = { sent: 0 };

const client = new OpenAI({
  baseURL: command.baseURL,
  apiKey: command.apiKey,
  maxRetries: command.maxRetries ?? 0,
  timeout: 60_000,
  fetch: (url, init) => {
    report.sent += 1;
    return fetch(url, init);
  },
});

const calls = {
  async create(body) {
    const { data, response, request_id } = await client.chat.completions
      .create(body)
      .withResponse();
    report.answer = data;
    report.requestId = request_id;
    report.generationId = response.headers.get("x-neocloud-generation-id");
  },

  async raw(body) {
    const response = await client.chat.completions.create(body).asResponse();
    report.generationId = response.headers.get("x-neocloud-generation-id");
    report.contentType = response.headers.get("content-type");
    report.text = await response.text();
  },

  async stream(body) {
    const { data, response } = await client.chat.completions
      .create({ ...body, stream: true })
      .withResponse();
    report.generationId = response.headers.get("x-neocloud-generation-id");
    report.chunks = [];
    for await (const chunk of data) report.chunks.push(chunk);
  },

  // The SDK's own helpers: one puts a stream together, the other answers the model's tool calls.
  async streamHelper(body) {
    report.answer = await client.chat.completions.stream(body).finalChatCompletion();
  },

  async runTools(body) {
    report.asked = [];
    const runner = client.chat.completions.runTools({
      ...body,
      stream: true,
      tools: body.tools.map((tool) => ({
        ...tool,
        function: {
          ...tool.function,
          parse: JSON.parse,
          function: (given) => {
            report.asked.push(given);
            return JSON.stringify({ celsius: 21 });
          },
        },
      })),
    });
    report.text = await runner.finalContent();
    report.messages = runner.messages;
  },

  async leave(body) {
    const { data, response } = await client.chat.completions
      .create({ ...body, stream: true })
      .withResponse();
    report.generationId = response.headers.get("x-neocloud-generation-id");
    report.chunks = [];
    for await (const chunk of data) {
      report.chunks.push(chunk);
      if (report.chunks.length === command.count) break;
    }
  },

  async models() {
    report.models = [];
    for await (const model of client.models.list()) report.models.push(model);
  },

  async model(id) {
    report.model = await client.models.retrieve(id);
  },

  async embed(body) {
    await client.embeddings.create(body);
  },
};

try {
  await calls[command.call](command.body);
} catch (error) {
  if (!(error instanceof OpenAI.APIError)) throw error;
  report.error = {
    class: error.constructor.name,
    status: error.status ?? null,
    code: error.code ?? null,
    param: error.param ?? null,
    type: error.type ?? null,
    message: error.message,
    requestId: error.requestID ?? null,
    headers: Object.fromEntries(error.headers ?? []),
  };
}
process.stdout.write(JSON.stringify(report));
