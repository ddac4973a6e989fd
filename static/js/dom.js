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

/** Is the reader of the page inside this element just now? */
export function isHeld(element) {
  return element.contains(document.activeElement);
}
