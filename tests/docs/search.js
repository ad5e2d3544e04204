// Asks the search of a built site, as a browser does: `node search.js SITE QUERY`.
// Prints the addresses of what it finds, the best page first, as JSON.
const fs = require("fs");
const vm = require("vm");

const [site, query] = process.argv.slice(2);
const folder = `${site}/assets/javascripts/workers`;
const name = fs.readdirSync(folder).find((file) => /^search.*\.js$/.test(file));
const [SETUP, READY, QUERY] = [0, 1, 2];

// The worker of the theme runs in this scope, and sends its answers to postMessage.
const scope = { console, setTimeout, URL, location: { href: "http://localhost/" } };
scope.self = scope;
scope.addEventListener = (_, listener) => (scope.listener = listener);
scope.postMessage = ({ type, data }) => {
  if (type === READY) scope.listener({ data: { type: QUERY, data: query } });
  else console.log(JSON.stringify(data.items.map(([best]) => best.location)));
};
vm.createContext(scope);
vm.runInContext(fs.readFileSync(`${folder}/${name}`, "utf8"), scope);
const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8"));
scope.listener({ data: { type: SETUP, data: { ...index, options: {} } } });
