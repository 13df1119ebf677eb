/* Search in place of MkDocs's own, which needs a web server: pages opened from file:// may not fetch, but load scripts. */
function load(names, then) {
  if (!names.length) return then();
  const script = document.createElement("script");
  script.src = base_url + "/search/" + names[0];
  script.onload = () => load(names.slice(1), then);
  document.head.append(script);
}

function excerpt(text, words) {
  const places = words.map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
  const begin = Math.max(0, Math.min(...places, text.length) - 60);
  return (begin ? "... " : "") + text.slice(begin, begin + 240) + " ...";
}

function show(query) {
  const results = document.getElementById("mkdocs-search-results");
  const pages = Object.fromEntries(searchIndex.docs.map((page) => [page.location, page]));
  const index = lunr(function () {
    this.ref("location");
    this.field("title", { boost: 10 });
    this.field("text");
    searchIndex.docs.forEach((page) => this.add(page));
  });
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = index.query((builder) => words.forEach((word) => {
    builder.term(lunr.tokenizer(word), { presence: lunr.Query.presence.REQUIRED });
  })).slice(0, 50);
  results.replaceChildren(...found.map(({ ref }) => {
    const article = document.createElement("article"), link = document.createElement("a");
    link.href = base_url + "/" + ref;
    link.textContent = pages[ref].title;
    article.append(link, document.createElement("br"), excerpt(pages[ref].text, words));
    return article;
  }));
  if (!found.length) results.textContent = results.dataset.noResultsText;
}

const query = new URLSearchParams(location.search).get("q");
if (query && document.getElementById("mkdocs-search-results")) {
  document.getElementById("mkdocs-search-query").value = query;
  load(["lunr.js", "index.js"], () => show(query));
}
