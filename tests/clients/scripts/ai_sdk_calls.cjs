// Vercel's AI SDK, unchanged, with its provider for compatible servers and with OpenAI's (chat and responses).
const assert = require('node:assert/strict');
const ai = require('ai');
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible');
const { createOpenAI } = require('@ai-sdk/openai');

const { CLIENT_URL, CLIENT_KEY, CLIENT_BLOCKED_KEY, CLIENT_SLOW_KEY } = process.env;
const prompt = 'good morning';
const answers = { demo: 'good morning', reverse: 'gninrom doog', upper: 'GOOD MORNING' };
const unseen = CLIENT_BLOCKED_KEY ? 'rot13' : 'nothing-of-this-name';
const baseURL = `${CLIENT_URL}/v1`;
const schema = ai.jsonSchema({
  type: 'object',
  properties: { count: { type: 'integer', minimum: 0, maximum: 99 }, kind: { enum: ['red', 'blue'] } },
  required: ['count', 'kind'],
  additionalProperties: false,
});
const tools = { add: ai.tool({ description: 'adds', inputSchema: schema }) };
const provider = (apiKey) => createOpenAICompatible({
  name: 'loraplex', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const compatible = provider(CLIENT_KEY);
const openai = createOpenAI({ baseURL, apiKey: CLIENT_KEY });

function check({ count, kind }) {
  assert(Number.isInteger(count) && count >= 0 && count <= 99 && ['red', 'blue'].includes(kind));
}

async function answered(model, answer) {
  const settings = { model, prompt, temperature: 0, maxRetries: 0 };
  const whole = await ai.generateText(settings);
  assert.equal(whole.text, answer);
  assert.equal(whole.finishReason, 'stop');
  assert(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0);
  const stream = ai.streamText(settings);
  let text = '';
  let pieces = 0;
  for await (const piece of stream.textStream) { text += piece; pieces += 1; }
  assert.equal(text, answer);
  assert(pieces >= 1);  // one, where the machine is so busy that all tokens are there at once
  assert((await stream.usage).outputTokens > 0);
}

async function formed(model) {
  const settings = { model, prompt, maxRetries: 0 };
  check((await ai.generateObject({ ...settings, schema })).object);
  const parts = ai.streamObject({ ...settings, schema });
  for await (const part of parts.partialObjectStream) assert.equal(typeof part, 'object');
  check(await parts.object);
  const called = await ai.generateText({ ...settings, tools, toolChoice: 'required' });
  assert.equal(called.finishReason, 'tool-calls');
  called.toolCalls.forEach((call) => check(call.input));
  const stream = ai.streamText({ ...settings, tools, toolChoice: { type: 'tool', toolName: 'add' } });
  await stream.consumeStream();
  const [call] = await stream.toolCalls;
  assert.equal(call.toolName, 'add');
  check(call.input);
}

async function status(model, wanted) {
  let found;
  await assert.rejects(
    () => ai.generateText({ model, prompt, maxRetries: 0 }),
    (error) => { found = error; return ai.APICallError.isInstance(error); },
  );
  assert.equal(found.statusCode, wanted, found.message);
  return found;
}

async function errors() {
  assert.match((await status(compatible(unseen), 404)).message, /does not exist/);
  if (!CLIENT_BLOCKED_KEY) return;
  await status(provider(`lp-${'0'.repeat(43)}`)('upper'), 401);
  const limited = await status(provider(CLIENT_BLOCKED_KEY)('upper'), 429);
  assert(limited.isRetryable);
  assert(Number(limited.responseHeaders['retry-after']) > 60);
  for (let i = 0; i < 2; i += 1) {
    const slow = { model: provider(CLIENT_SLOW_KEY)('upper'), prompt, temperature: 0, maxRetries: 5 };
    assert.equal((await ai.generateText(slow)).text, answers.upper);
  }
}

async function main() {
  for (const [name, answer] of Object.entries(answers)) {
    for (const model of [compatible(name), openai.chat(name), openai.responses(name)]) {
      await answered(model, answer);
      await formed(model);
    }
  }
  const { text } = await ai.generateText({
    model: compatible.completionModel('reverse'), prompt: `${prompt}=`, temperature: 0, maxRetries: 0,
  });
  assert.equal(typeof text, 'string');
  await errors();
  console.log('all calls answered');
}

main().catch((error) => { console.error(error); process.exit(1); });
