// What is known of one run. Pure: events and times come in, numbers and sentences come out.

/** A run that began at `now`, in milliseconds. */
export function newRun(now) {
  return { began: now, first: null, last: now, started: null, complete: null, pieces: [], ids: [], text: "", steps: [] };
}

/** Take the next event, which came at `now`. */
export function take(run, event, now) {
  if (event.type === "started") {
    run.started = event;
  } else if (event.type === "complete") {
    run.complete = event;
  } else {
    takeChunk(run, event, now);
  }
}

function takeChunk(run, chunk, now) {
  if (chunk.step) {
    run.steps.push({ ...chunk.step, ids: 0 });
  }
  if (!chunk.token_ids.length) {
    return;
  }
  run.first ??= now;
  run.last = now;
  run.pieces.push({ text: chunk.text, origins: chunk.origins, step: run.steps.length - 1 });
  run.ids.push(...chunk.token_ids);
  run.text += chunk.text;
}

/** Tokens per second after the first token; null while there is none. The services' own times where they are known. */
export function rateOf(run) {
  const tokens = run.ids.length - 1;
  const counts = run.complete?.speculation;
  const seconds = counts ? (counts.total_micros - counts.first_token_micros) / 1e6 : (run.last - run.first) / 1e3;
  return run.first === null || tokens < 1 || seconds <= 0 ? null : tokens / seconds;
}

/** Short facts about a run, in the order of their weight. */
export function factsOf(run) {
  const counts = run.complete?.speculation;
  const facts = [`${run.ids.length} tokens`];
  if (run.first !== null) {
    facts.push(`first after ${Math.round(counts ? counts.first_token_micros / 1e3 : run.first - run.began)} ms`);
  }
  if (run.steps.length) {
    facts.push(`${(run.ids.length / run.steps.length).toFixed(2)} tokens per step`);
  }
  const { verified, accepted } = candidatesOf(run.steps);
  if (verified) {
    facts.push(`${Math.round((100 * accepted) / verified)} % of the candidates accepted`);
  }
  if (counts?.decode_micros) {
    facts.push(`target busy ${Math.round((100 * counts.decode_busy_micros) / counts.decode_micros)} % of the time`);
  }
  return facts;
}

function candidatesOf(steps) {
  const nodes = steps.flatMap((step) => step.nodes);
  return { verified: nodes.length, accepted: nodes.filter((node) => node.accepted).length };
}

/** What two finished runs of one request say together. */
export function comparisonOf(drafted, alone) {
  const equal = drafted.text === alone.text && drafted.ids.join() === alone.ids.join();
  if (!equal) {
    const other = [...alone.text];
    const at = [...drafted.text].findIndex((sign, index) => sign !== other[index]);
    return `The texts differ${at < 0 ? " in their length" : ` from character ${at + 1} on`}.`;
  }
  const [fast, slow] = [rateOf(drafted), rateOf(alone)];
  const times = fast && slow ? ` ${(fast / slow).toFixed(1)} times the tokens per second with drafts.` : "";
  return `Both texts are equal, token by token.${times}`;
}

/** One sentence about a step. */
export function summaryOf(step, count) {
  const accepted = step.nodes.filter((node) => node.accepted).length;
  const of = step.nodes.length ? `${accepted} of ${step.nodes.length} candidates accepted` : "no candidates";
  return `Step ${step.number} of ${count}: ${of}${step.bonus ? ", one token by the target" : ""}.`;
}
