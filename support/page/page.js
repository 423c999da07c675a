// One listener for a whole view: it outlives what is drawn in it. What was clicked or typed becomes an event.
const EVENTS = {generate: 'write', branch: 'write', stop: 'stop', peek: 'peek'};
const act = piece => {
  if (window.flush) { window.flush(); return setTimeout(() => act(piece), 200); }  // first what was typed
  const data = {...piece.dataset};
  const form = data.do === 'branch' ? document.querySelector('#writer .form') : piece.closest('.form');
  for (const input of form?.querySelectorAll('[name]') ?? [])
    data[input.name] = input.type === 'checkbox' ? input.checked : input.value;
  if (piece.matches('textarea, select')) data[piece.name || 'value'] = piece.value;
  const name = EVENTS[data.do];
  if (name === 'write') trigger('write', data);
  else if (name === 'stop') trigger('stop', data);
  else if (name === 'peek') trigger('peek', data);
  else trigger('act', data);
};
const FIELDS = 'textarea, select, input';
element.addEventListener('click', event => {
  const piece = event.target.closest('[data-do]');
  if (piece && !piece.matches(FIELDS)) act(piece);
});
element.addEventListener('keydown', event => {
  const piece = event.target.closest('[role=button][data-do]');
  if (piece && (event.key === 'Enter' || event.key === ' ')) { event.preventDefault(); act(piece); }
});
let waiting;
element.addEventListener('input', event => {
  const field = event.target;
  if (!field.matches(FIELDS) || !field.dataset.do) return;
  clearTimeout(waiting);
  window.flush = () => { window.flush = null; clearTimeout(waiting); act(field); };
  waiting = setTimeout(() => window.flush?.(), field.matches('select') ? 0 : 120);
});
// A view is drawn anew after a click: the focus goes back to what had it.
let focused = '';
element.addEventListener('focusin', event => {
  const piece = event.target.closest('[data-do]');
  focused = piece ? Object.entries(piece.dataset).filter(([name]) => ['do', 'by', 'index', 'token', 'tab', 'function', 'bucket'].includes(name))
    .map(([name, value]) => `[data-${name}="${CSS.escape(value)}"]`).join('') : '';
});
element.addEventListener('focusout', event => { if (event.relatedTarget) focused = ''; });
// Details of what the pointer or the focus is on take the place of the sentence.
const tell = event => {
  const piece = event.target.closest('[data-tip]'), line = element.querySelector('.sentence, .tip');
  if (!line) return;
  line.dataset.own ??= line.textContent;
  line.textContent = piece ? piece.dataset.tip : line.dataset.own;
};
for (const name of ['mouseover', 'focusin']) element.addEventListener(name, tell);
for (const name of ['mouseleave', 'focusout']) element.addEventListener(name, () => tell({target: element}));
// Sliders: a number out of range is said, not bent; what fits is sent.
const send = () => trigger('slide', Object.fromEntries(
  [...element.querySelectorAll('input[type=range]')].map(input => [input.name, Number(input.value)])));
element.addEventListener('input', ({target}) => {
  const status = element.querySelector('.sliders [role=status]');
  if (!status) return;
  const wrong = !target.value || !target.checkValidity();
  target.setAttribute('aria-invalid', wrong);
  status.textContent = wrong ? `${target.name} is a number from ${target.min} to ${target.max}; the old value holds` : '';
  if (wrong) return;
  for (const twin of element.querySelectorAll(`[name=${target.name}]`)) twin.value = target.value;
  send();
});
element.addEventListener('click', ({target}) => {
  if (!target.dataset.reset) return;
  for (const input of element.querySelectorAll('input')) input.value = input.dataset.default;
  element.querySelector('[role=status]').textContent = '';
  send();
});
if (element.querySelector('.head')) trigger('act', {do: 'load', query: location.search.slice(1)});
// The address says what is seen. The server knows prompt and position; the tab is known here.
const address = tab => {
  const link = element.querySelector('[data-link]'), found = new URL(link.dataset.link, location);
  tab ??= found.searchParams.get('tab') ?? new URL(location).searchParams.get('tab');
  if (tab) found.searchParams.set('tab', tab);
  link.href = found.search;
  history.replaceState(null, '', found.search);
};
watch('value', () => setTimeout(() => {
  const text = element.querySelector('.text'), chosen = element.querySelector('.context [aria-pressed=true]');
  if (element.querySelector('[data-link]')) { address(); window.visit = address; }
  if (chosen) chosen.parentNode.scrollLeft = chosen.offsetLeft - chosen.parentNode.clientWidth / 2;
  if (text) text.scrollTop = text.scrollHeight;
  const drawn = new DOMParser().parseFromString(props.value, 'text/html');  // drawing leaves what a user set
  for (const field of element.querySelectorAll('#prompt, select'))
    if (field.options || field !== document.activeElement) field.value = drawn.querySelector(`[data-do=${field.dataset.do}]`).value;
  if (focused) element.querySelector(focused)?.focus({preventScroll: true});
}));
