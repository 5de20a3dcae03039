// Small helpers for the document.

const NAMESPACE = "http://www.w3.org/2000/svg";

/** The element with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new SVG element. */
export function svg(name, attributes, ...children) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** A new HTML element with a class and a text. */
export function html(name, className, text) {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

/** What a token stands for, with signs for spaces and line ends; its id where it has no text. */
export function readable(token) {
  if (!token.text) {
    return `#${token.id}`;
  }
  return token.text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}
