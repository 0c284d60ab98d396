// The draft tree of a step, and the histogram of accepted draft tokens, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 26, COLUMN = 96, WIDTH = 78, HEIGHT = 20;

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

/** Return a token as a label: whitespace made visible, cut to `length` characters. */
export function label(text, length = 9) {
  const shown = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");
  return shown.length > length ? `${shown.slice(0, length - 1)}…` : shown;
}

/** Return the depth (column) and row of every node, and the number of rows: leaves in order, parents between their children. */
function layout(nodes) {
  const children = [[], ...nodes.map(() => [])];
  nodes.forEach((node, index) => children[node.parent].push(index + 1));
  const places = new Array(nodes.length + 1);
  let row = 0;
  const place = (node, depth) => {
    const rows = children[node].map((child) => place(child, depth + 1));
    places[node] = { depth, row: rows.length ? (rows[0] + rows.at(-1)) / 2 : row++ };
    return places[node].row;
  };
  place(0, 0);
  return { places, numRows: row };
}

/** Return the picture of a step: its nodes, sources, and the accepted path. root: the text of the token before it. */
export function drawTree(step, root) {
  const { places, numRows } = layout(step.nodes);
  const accepted = new Set([0, ...step.path]);
  const numColumns = Math.max(...places.map((place) => place.depth)) + 1;
  const size = { width: numColumns * COLUMN, height: numRows * ROW + 4 };
  const svg = element("svg", { ...size, role: "img", "aria-label": `draft tree of ${step.nodes.length} nodes` });
  const x = (node) => places[node].depth * COLUMN + 2, y = (node) => places[node].row * ROW + 2;
  step.nodes.forEach((node, index) => {
    const child = index + 1, from = x(node.parent) + WIDTH, to = x(child), middle = (from + to) / 2;
    const top = y(node.parent) + HEIGHT / 2, bottom = y(child) + HEIGHT / 2;
    const kind = accepted.has(child) ? "edge accepted" : "edge";
    element("path", { class: kind, d: `M${from} ${top}C${middle} ${top} ${middle} ${bottom} ${to} ${bottom}` }, svg);
  });
  places.forEach((place, node) => {
    const drafted = node ? step.nodes[node - 1] : null;
    const group = element("g", { class: accepted.has(node) ? "node accepted" : "node" }, svg);
    const words = drafted ? `${JSON.stringify(drafted.text)}\n${drafted.source}, depth ${place.depth}` : "the last token before";
    element("title", {}, group, `${words}${drafted && accepted.has(node) ? "\naccepted" : ""}`);
    element("rect", { x: x(node), y: y(node), width: WIDTH, height: HEIGHT, rx: 4 }, group);
    element("text", { x: x(node) + 5, y: y(node) + 14 }, group, label(drafted ? drafted.text : root));
  });
  return svg;
}

/** Return the histogram: how many steps accepted 0, 1, 2, … draft tokens. */
export function drawHistogram(counts) {
  const most = Math.max(...counts, 1), bar = 26, height = 70;
  const svg = element("svg", {
    width: counts.length * bar + 4, height: height + 32, role: "img",
    "aria-label": `steps by accepted draft tokens: ${counts.map((count, k) => `${k}: ${count}`).join(", ")}`,
  });
  counts.forEach((count, k) => {
    const tall = (count / most) * height, x = k * bar + 2, top = height - tall + 14;
    element("rect", { class: "bar", x, y: top, width: bar - 6, height: tall, rx: 2 }, svg);
    if (count) element("text", { class: "count", x: x + 4, y: top - 3 }, svg, String(count));
    element("text", { class: "count", x: x + 7, y: height + 28 }, svg, String(k));
  });
  return svg;
}
