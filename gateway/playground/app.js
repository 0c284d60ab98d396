// The page: reads the form, runs one or two lanes, says which was faster and whether the texts are the same.

import { Lane } from "./lane.js";

const byId = (id) => document.getElementById(id);
const tip = byId("tip"), lanes = byId("lanes"), verdict = byId("verdict");
let running = null;

function request(method) {
  const number = (id) => Number(byId(id).value);
  const config = byId("config").value.trim(), prediction = byId("prediction").value;
  return {
    prompt: byId("prompt").value,
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    top_p: number("top_p"),
    seed: number("seed"),
    speculation: method,
    stream: true,
    stream_options: { include_usage: true },
    logprobs: 3,
    return_steps: true,
    return_token_ids: true,
    // Each lane has its own salt, so that none finds its prompt in the cache because another lane ran before it.
    cache_salt: crypto.getRandomValues(new Uint32Array(2)).join("-"),
    ...(config ? { speculation_config: config } : {}),
    ...(method.split("+").includes("predicted") ? { prediction: { type: "content", content: prediction } } : {}),
  };
}

async function generate() {
  running?.abort();
  const control = (running = new AbortController());
  const methods = [byId("method").value, byId("rival").value].filter(Boolean);
  const made = methods.map((method) => new Lane(method, tip));
  lanes.replaceChildren(...made.map((lane) => lane.root));
  verdict.textContent = "";
  document.body.dataset.state = "running";
  byId("stop").disabled = false;
  const times = await Promise.all(
    made.map((lane) => lane.run(request(lane.method), byId("key").value, control.signal)),
  );
  if (running !== control) return;
  running = null;
  byId("stop").disabled = true;
  if (made.length === 2 && times.every((time) => time !== null)) judge(made, times);
  document.body.dataset.state = "done";
}

function judge(made, times) {
  const [sooner, later] = times[0] <= times[1] ? [0, 1] : [1, 0];
  made[sooner].badge("sooner");
  const same = made[0].text === made[1].text ? "The same text" : "Different texts";
  verdict.textContent = `${same}; ${made[sooner].method} was ${(times[later] / times[sooner]).toFixed(2)} × as fast.`;
}

async function fillMethods() {
  const key = byId("key").value;
  const response = await fetch("/playground/methods", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (!response.ok) {
    verdict.textContent = (await response.json()).error.message;
    return;
  }
  const { model, methods } = await response.json();
  byId("model").textContent = model;
  const options = methods.map((name) => new Option(name, name));
  byId("method").replaceChildren(...options.map((option) => option.cloneNode(true)));
  byId("rival").replaceChildren(new Option("nobody", ""), ...options);
  byId("method").value = methods.includes("auto") ? "auto" : methods[0];
  verdict.textContent = "";
}

function readAddress() {
  const values = new URLSearchParams(location.search);
  for (const [name, value] of values) {
    const field = byId(name);
    if (field && "value" in field) field.value = value;
  }
  if (values.has("run")) generate();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("key").addEventListener("change", fillMethods);
byId("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
});
byId("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
});
await fillMethods();
readAddress();
document.body.dataset.state ??= "ready";
