// Calls to the server, and what went wrong with them in words.

/** An answer that is an error, as the server told it. */
export class Problem extends Error {
  constructor(status, body) {
    super(body?.detail ?? `the server answered ${status}`);
    this.status = status;
    this.code = body?.code;
    this.title = body?.title;
    this.requestId = body?.request_id;
  }

  /** This server has no such endpoint: an older one, or one without the part. */
  get isUnknownHere() {
    return this.status === 404 && this.message.startsWith("there is nothing at this path");
  }
}

async function call(method, path, { body, headers, signal } = {}) {
  const request = { method, headers: { ...headers }, signal };
  if (body !== undefined) {
    request.headers["Content-Type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "the server cannot be reached", code: "unreachable" });
  }
  const isJson = (response.headers.get("Content-Type") ?? "").includes("json");
  const answer = isJson ? await response.json() : null;
  if (response.status === 401) logIn();
  if (!response.ok) throw new Problem(response.status, answer);
  return answer;
}

/** The server wants to know who asks: off to the login, and back here afterwards. */
export function logIn() {
  if (location.pathname !== "/login") location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
}

export const get = (path, signal) => call("GET", path, { signal });
export const post = (path, body, headers) => call("POST", path, { body, headers });
export const put = (path, body) => call("PUT", path, { body });
export const remove = (path) => call("DELETE", path);

/** A path with its parts percent-encoded: path`/v1/stock/${sku}`. */
export function path(parts, ...values) {
  return parts.reduce((whole, part, index) => whole + encodeURIComponent(values[index - 1]) + part);
}

/** A query string of the parameters that are set. */
export function query(parameters) {
  const set = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(set).toString();
  return text ? `?${text}` : "";
}

/** What a GET finds, or null where there is nothing. */
export async function find(path, signal) {
  try {
    return await get(path, signal);
  } catch (error) {
    if (error instanceof Problem && [400, 404, 422].includes(error.status)) return null;
    throw error;
  }
}
