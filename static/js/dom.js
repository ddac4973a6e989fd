// Elements without markup: every text becomes a text node, so nothing that came from outside can become a tag.

/** Makes an element. `props`: attributes; `class`; `on…` listeners; `data-…`. Children: nodes, texts, lists, nothing. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false);
}

/** Replaces what an element holds. */
export function put(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

/** Writes a text only if it is another one, so that readers of the screen are not disturbed for nothing. */
export function say(element, text) {
  const words = String(text);
  if (element.textContent !== words) element.textContent = words;
}

let pressed = false;
for (const [kind, now] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false], ["blur", false]]) {
  addEventListener(kind, () => { pressed = now; }, { capture: true, passive: true });
}

/** Is a button or link being pressed just now? One that is replaced between down and up is never clicked. */
export function isPressed() {
  return pressed;
}

/** Does the reader have something of this element in hand, by a press, by the keyboard, or by writing in it? */
export function isHeld(element) {
  const at = document.activeElement;
  return pressed || (element.contains(at) && (at.matches("input, select, textarea") || (at.matches("a, button") && at.matches(":focus-visible"))));
}

/** Replaces what an element holds, and leaves the focus on what stands where it was, or on the heading if that is gone. */
export function redraw(element, ...children) {
  const held = element.contains(document.activeElement) ? document.activeElement : null;
  const ofKind = () => [...element.querySelectorAll(held.tagName)];
  const isAlike = (other) => other.textContent === held.textContent && other.getAttribute("aria-label") === held.getAttribute("aria-label");
  const before = held ? ofKind() : [];
  put(element, ...children);
  if (!held) return;
  const after = ofKind();
  const inPlace = after.length === before.length ? after[before.indexOf(held)] : null;
  const next = after.filter(isAlike)[before.filter(isAlike).indexOf(held)] ?? inPlace ?? element.closest("section, main")?.querySelector("h1, h2");
  if (next && next.tabIndex < 0) next.setAttribute("tabindex", "-1");
  next?.focus({ preventScroll: true });
}
