// Reads the events of one request. The gateway answers with server-sent events, each a JSON object.

/** An answer that is no text: `message` is a sentence for the person at the page. */
export class Refusal extends Error {}

const UNREACHABLE = "The gateway cannot be reached. Is it running?";
const CUT = "The connection ended before the text did.";

/** The events of a request, as they come. `signal` ends it; then this throws an AbortError. */
export async function* eventsOf(body, { token, traceparent, signal }) {
  const answer = await ask(body, headersOf(token, traceparent), signal);
  if (!answer.ok) {
    throw new Refusal(await sentenceOf(answer));
  }
  for await (const data of dataOf(answer.body, signal)) {
    if (data === "[DONE]") {
      return;
    }
    const event = JSON.parse(data);
    if (event.error) {
      throw new Refusal(event.error.message);
    }
    yield event;
  }
  throw new Refusal(CUT);
}

/** A W3C trace context of a new trace that is recorded where the services record traces. */
export function newTrace() {
  const traceId = hex(16);
  return { traceId, traceparent: `00-${traceId}-${hex(8)}-01` };
}

function hex(bytes) {
  return Array.from(crypto.getRandomValues(new Uint8Array(bytes)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function headersOf(token, traceparent) {
  const headers = { "content-type": "application/json", traceparent };
  return token ? { ...headers, authorization: `Bearer ${token}` } : headers;
}

async function ask(body, headers, signal) {
  try {
    return await fetch("outrider/stream", { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refusal(UNREACHABLE);
  }
}

async function sentenceOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The gateway answered with status ${answer.status}.`;
  }
}

/** The data lines of an event stream. */
async function* dataOf(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await next(reader, signal);
    if (done) {
      return;
    }
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
  }
}

async function next(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    throw signal.aborted ? error : new Refusal(CUT);
  }
}
