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
}

/** The name under which this browser acts, for the record of actions. */
export const operator = {
  get: () => localStorage.getItem("stockade.operator") ?? "",
  set: (name) => localStorage.setItem("stockade.operator", name),
};

async function call(method, path, { body, headers, signal, keepalive, read = "json" } = {}) {
  const request = { method, headers: { ...headers }, signal, keepalive };
  // A header holds ASCII; whoever has another name is still recorded, by what is left of it.
  const name = operator.get().replace(/[^\x20-\x7e]/g, "").trim();
  if (method !== "GET" && name) request.headers["X-Operator"] = name;
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
  if (response.status === 401) logIn();
  if (!response.ok) throw new Problem(response.status, isJson ? await response.json() : null);
  if (read === "text") return response.text();
  return isJson ? response.json() : null;
}

/** The server wants to know who asks: off to the login, and back here afterwards. */
export function logIn() {
  if (location.pathname !== "/login") location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
}

export const get = (path, signal) => call("GET", path, { signal });
/** The answer to the letter: numbers too large for a script stay what they are. */
export const text = (path, signal) => call("GET", path, { signal, read: "text" });
export const post = (path, body, headers) => call("POST", path, { body, headers });
/** A POST that is sent even if the page is being left. */
export const postAtLast = (path) => call("POST", path, { keepalive: true });
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

/** What a GET finds, or null where there is nothing, or nothing for whoever asks. */
export async function find(path, signal) {
  try {
    return await get(path, signal);
  } catch (error) {
    if (error instanceof Problem && [400, 403, 404, 422].includes(error.status)) return null;
    throw error;
  }
}
