// openai for JavaScript, unchanged: chat, completions and responses, whole and streamed, forms, tools, errors, retries.
const assert = require('node:assert/strict');
const OpenAI = require('openai');

const { CLIENT_URL, CLIENT_KEY, CLIENT_BLOCKED_KEY, CLIENT_SLOW_KEY } = process.env;
const phrase = 'good morning';
const answers = { demo: 'good morning', reverse: 'gninrom doog', upper: 'GOOD MORNING' };
const unseen = CLIENT_BLOCKED_KEY ? 'rot13' : 'nothing-of-this-name';
const messages = [{ role: 'user', content: phrase }];
const schema = {
  type: 'object',
  properties: { count: { type: 'integer', minimum: 0, maximum: 99 }, kind: { enum: ['red', 'blue'] } },
  required: ['count', 'kind'],
  additionalProperties: false,
};
const tools = [{ type: 'function', function: { name: 'add', parameters: schema, strict: true } }];

const make = (apiKey, maxRetries) => new OpenAI({ baseURL: `${CLIENT_URL}/v1`, apiKey, maxRetries, timeout: 60_000 });
const client = make(CLIENT_KEY, 0);

function check(text) {
  const { count, kind, ...others } = JSON.parse(text);
  assert(Number.isInteger(count) && count >= 0 && count <= 99 && ['red', 'blue'].includes(kind), text);
  assert.deepEqual(others, {});
}

async function refused(call, kind) {
  let found;
  await assert.rejects(call, (error) => { found = error; return error instanceof kind; });
  return found;
}

async function answered(model, answer) {
  const chat = await client.chat.completions.create({ model, messages, temperature: 0 });
  assert.equal(chat.choices[0].message.content, answer);
  const stream = client.chat.completions.stream({ model, messages, temperature: 0 });
  let pieces = 0;
  stream.on('content', () => { pieces += 1; });
  assert.equal(await stream.finalContent(), answer);
  assert(pieces >= 1);  // one, where the machine is busy
  const text = await client.completions.create({ model, prompt: `${phrase}=`, temperature: 0 });
  assert.equal(text.choices[0].text, answer);
  let told = '';
  for await (const chunk of await client.completions.create({
    model, prompt: `${phrase}=`, temperature: 0, stream: true, stream_options: { include_usage: true },
  })) told += chunk.choices[0]?.text ?? '';
  assert.equal(told, answer);
  assert.equal((await client.responses.create({ model, input: phrase, temperature: 0 })).output_text, answer);
  const events = client.responses.stream({ model, input: phrase, temperature: 0 });
  assert.equal((await events.finalResponse()).output_text, answer);
}

async function formed(model) {
  const form = { type: 'json_schema', json_schema: { name: 'answer', schema, strict: true } };
  check((await client.chat.completions.parse({ model, messages, response_format: form })).choices[0].message.content);
  const text = { format: { type: 'json_schema', name: 'answer', schema, strict: true } };
  check((await client.responses.create({ model, input: phrase, text })).output_text);
  const whole = await client.chat.completions.create({ model, messages, tools, tool_choice: 'required' });
  assert.equal(whole.choices[0].finish_reason, 'tool_calls');
  whole.choices[0].message.tool_calls.forEach((call) => check(call.function.arguments));
  const stream = client.chat.completions.stream({
    model, messages, tools, tool_choice: { type: 'function', function: { name: 'add' } },
  });
  const [call] = (await stream.finalMessage()).tool_calls;
  assert.equal(call.function.name, 'add');
  check(call.function.arguments);
}

async function errors() {
  const ask = (who, fields) => () => who.chat.completions.create({ model: 'upper', messages, ...fields });
  assert.equal((await refused(ask(client, { model: unseen }), OpenAI.NotFoundError)).code, 'model_not_found');
  await refused(ask(client, { model: unseen, stream: true }), OpenAI.NotFoundError);
  assert.equal((await refused(ask(client, { temperatur: 0 }), OpenAI.BadRequestError)).param, 'temperatur');
  if (!CLIENT_BLOCKED_KEY) return;
  await refused(ask(make(`lp-${'0'.repeat(43)}`, 0)), OpenAI.AuthenticationError);
  const limited = await refused(ask(make(CLIENT_BLOCKED_KEY, 0)), OpenAI.RateLimitError);
  assert(Number(limited.headers.get('retry-after')) > 60);
  const slow = make(CLIENT_SLOW_KEY, 5);
  for (let i = 0; i < 2; i += 1) {
    assert.equal((await ask(slow, { temperature: 0 })()).choices[0].message.content, answers.upper);
  }
}

async function main() {
  for (const [model, answer] of Object.entries(answers)) {
    await answered(model, answer);
    await formed(model);
  }
  const ids = [];
  for await (const card of client.models.list()) ids.push(card.id);
  assert(Object.keys(answers).every((name) => ids.includes(name)));
  await errors();
  console.log('all calls answered');
}

main().catch((error) => { console.error(error); process.exit(1); });
