// Draws the candidate tree of one step: depth from left to right, the most likely path on top.

import { readable, svg } from "./elements.js";

const ROW = 30;
const HEIGHT = 22;
const GAP = 26;
const SIGN = 8;
const PADDING = 16;
const MAX_SIGNS = 14;
const ROOT = 12;

/** Draw a step into an <svg>. */
export function drawTree(element, step) {
  const nodes = laidOut(step);
  const widths = columnWidths(nodes);
  const lefts = widths.map((_, depth) => ROOT + GAP + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  for (const node of nodes) {
    node.left = lefts[node.depth];
    node.middle = (node.row + 0.5) * ROW;
  }
  const rows = 1 + Math.max(0, ...nodes.map((node) => node.row));
  element.setAttribute("width", (lefts.at(-1) ?? ROOT) + (widths.at(-1) ?? 0) + 2);
  element.setAttribute("height", rows * ROW);
  element.setAttribute("aria-label", spoken(step));
  const root = svg("circle", { class: "root", cx: 6, cy: ROW / 2, r: 4 });
  element.replaceChildren(root, ...nodes.map((node) => edge(node, nodes)), ...nodes.map(box));
}

/** The step's nodes and the target's own token, each with its depth and its row. */
function laidOut(step) {
  const nodes = step.nodes.map((node) => ({ ...node, children: [] }));
  if (step.bonus) {
    const last = nodes.findLastIndex((node) => node.accepted);
    nodes.push({ ...step.bonus, parent: last < 0 ? null : last, origin: "target", accepted: true, children: [] });
  }
  const roots = [];
  for (const node of nodes) {
    (node.parent === null ? roots : nodes[node.parent].children).push(node);
  }
  let row = 0;
  const place = (siblings, depth) => {
    // What was chosen comes first, so that it lies on one line.
    for (const node of siblings.sort((a, b) => Number(b.accepted) - Number(a.accepted))) {
      node.depth = depth;
      node.row = row;
      place(node.children, depth + 1);
      row += node.children.length ? 0 : 1;
    }
  };
  place(roots, 0);
  return nodes;
}

function columnWidths(nodes) {
  const widths = [];
  for (const node of nodes) {
    node.label = shortened(readable(node));
    node.width = node.label.length * SIGN + PADDING;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  return widths;
}

function edge(node, nodes) {
  const parent = node.parent === null ? null : nodes[node.parent];
  const from = parent ? parent.left + parent.width : 10;
  const height = parent ? parent.middle : ROW / 2;
  const bend = (from + node.left) / 2;
  const path = `M${from} ${height}C${bend} ${height} ${bend} ${node.middle} ${node.left} ${node.middle}`;
  return svg("path", { class: node.accepted ? "edge accepted" : "edge", d: path });
}

function box(node) {
  const attributes = { x: node.left, y: node.middle - HEIGHT / 2, width: node.width, height: HEIGHT, rx: 6 };
  const text = svg("text", { x: node.left + PADDING / 2, y: node.middle + 4.5, textLength: node.width - PADDING });
  text.textContent = node.label;
  const title = svg("title", {});
  title.textContent = `${readable(node)}: ${NAMES[node.origin]}${node.accepted ? "" : ", not chosen"}`;
  const classes = node.accepted ? "node accepted" : "node";
  return svg("g", { class: classes, "data-origin": node.origin }, title, svg("rect", attributes), text);
}

function spoken(step) {
  const chosen = step.nodes.filter((node) => node.accepted).map(readable);
  const own = step.bonus ? ` The target added ${readable(step.bonus)}.` : "";
  return `${step.nodes.length} candidates; accepted: ${chosen.join(" ") || "none"}.${own}`;
}

function shortened(text) {
  return text.length > MAX_SIGNS ? `${text.slice(0, MAX_SIGNS - 1)}…` : text;
}

/** How the page calls the origins. */
export const NAMES = {
  target: "the target’s own",
  draft: "proposed by a draft",
  lookup: "found by lookup in the text",
  grammar: "forced by a grammar",
  prediction: "predicted by the caller",
};
