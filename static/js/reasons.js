// Reason codes of dead letters, in words: what happened, and what can be done.

const WORDS = {
  "not-utf8": "the bytes are no text",
  "not-json": "the text is no JSON",
  "too-large": "it is larger than an event may be",
  "too-deep": "it is nested deeper than any event",
  "no-id": "it has no event id, so nobody could tell a repeat",
  "id-mismatch": "its ids contradict each other",
  "id-reused": "its id was used before, for another body",
  "unknown-type": "this consumer knows no such event",
  "unknown-version": "it is of a version that nobody here knows",
  envelope: "its envelope lacks something",
  schema: "its payload is not what this event carries",
  "content-type": "it does not say that it is JSON",
  "too-old": "it is older than the inbox remembers, so a repeat could not be told",
  "business-rule": "a rule of the shop forbids it, now and for ever",
  "retries-exhausted": "every attempt failed",
  "handler-panic": "the consumer broke over it, each time",
  "process-killer": "the process died over it several times",
  "broker-limit": "the broker gave up on it",
  "predecessor-missing": "what it follows never arrived",
  refused: "the receiver outside will never take it",
  "outcome-unknown": "it may have reached the receiver outside, and nobody can tell",
  "not-concluded": "it was done outside, but that could not be written down",
};

const ADVICE = {
  "retries-exhausted": "Mend what failed, then redrive: its attempts start anew.",
  "handler-panic": "Deploy a version that can handle it, then redrive.",
  "process-killer": "Look at the log of the process that died before you redrive it.",
  "unknown-type": "Deploy a version that knows the event, then redrive; or discard it.",
  schema: "Mend the producer. If a newer version can read it, redrive; else discard it.",
  "predecessor-missing": "If the event before it has come since, redrive.",
  refused: "Read what the receiver said, mend it on either side, then redrive.",
  "outcome-unknown": "Ask the receiver: redrive if it has not got it, discard if it has.",
  "not-concluded": "The error tells how the call ended: redrive only if it may be made again.",
  "broker-limit": "Find out why it was never acknowledged, then redrive.",
};

export function reasonInWords(code) {
  return WORDS[code] ?? "a reason that this page does not know";
}

export function advice(code) {
  return ADVICE[code] ?? "As it is, a redrive would end the same way. Mend the producer and discard this one, with a reason.";
}
