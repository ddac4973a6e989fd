// How this browser likes the pages: light, dark, or as the system says; roomy or compact; with payloads or without.

const THEMES = ["system", "light", "dark"];

export function current() {
  const stored = localStorage.getItem("stockade.theme");
  return THEMES.includes(stored) ? stored : "system";
}

export function set(theme) {
  localStorage.setItem("stockade.theme", theme);
  start();
}

/** The other one of what is seen now. */
export function next() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const seen = current() === "system" ? (dark ? "dark" : "light") : current();
  set(seen === "dark" ? "light" : "dark");
}

export function start() {
  document.documentElement.dataset.theme = current();
  document.documentElement.dataset.density = density();
}

export function density() {
  return localStorage.getItem("stockade.density") === "compact" ? "compact" : "roomy";
}

export function setDensity(value) {
  localStorage.setItem("stockade.density", value);
  start();
}

export function hidesPayloads() {
  return localStorage.getItem("stockade.hide-payloads") === "yes";
}

export function setHidesPayloads(value) {
  localStorage.setItem("stockade.hide-payloads", value ? "yes" : "no");
}
