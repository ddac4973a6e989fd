//! Every page, as everybody sees it: light and dark, wide and narrow, with a keyboard, with hostile texts.
//!
//! The checks of accessibility are our own: contrast, names, labels, headings, captions, sizes. They ask a real browser
//! for what it drew, so that they hold for the styles as they are.

use serde_json::{Value, json};

use crate::support::{Browser, Engine, Server, TestDb};

const PAGES: [&str; 14] = [
    "/",
    "/orders",
    "/reservations",
    "/stock",
    "/notifications",
    "/ledger",
    "/outbox",
    "/inbox",
    "/dead-letters",
    "/queues",
    "/replays",
    "/audit",
    "/lab",
    "/settings",
];

/// Texts that become something else where a page is careless.
const HOSTILE: [&str; 6] = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror=\"window.pwned = 2\">",
    "\"><svg onload=window.pwned=3>",
    "javascript:window.pwned=4",
    "'-alert(1)-'${window.pwned=5}{{7*7}}",
    "</textarea></title><iframe srcdoc='<script>parent.pwned=6</script>'>",
];

/// What a reader with poor sight, a keyboard or a screen reader would stumble over on this page.
const STUMBLES: &str = r##"
const found = [];
const seen = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && !element.closest(".unseen, .skip");
const name = (element) => element.getAttribute("aria-label") || (element.labels?.[0]?.textContent) || element.textContent.trim() || element.getAttribute("alt") || element.title;
const where = (element) => `${element.tagName.toLowerCase()}.${element.className} ${element.textContent.slice(0, 40)}`;
const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
const light = ([r, g, b]) => { const f = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
const ground = (element) => { for (let at = element; at; at = at.parentElement) { const colour = parse(getComputedStyle(at).backgroundColor); if (colour[3] > 0.99) return colour; } return [255, 255, 255, 1]; };

for (const element of document.querySelectorAll("body *")) {
  const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!says || !seen(element) || element.closest("script, option, [aria-disabled=true]")) continue;
  const style = getComputedStyle(element);
  const [a, b] = [light(parse(style.color)), light(ground(element))].sort((x, y) => y - x);
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < (large ? 3 : 4.5)) found.push(`contrast ${ratio.toFixed(2)}: ${where(element)}`);
}
for (const element of document.querySelectorAll("a[href], button, input, select, [role=img], [role=region]")) {
  if (seen(element) && !name(element)) found.push(`no name: ${where(element)}`);
}
for (const element of document.querySelectorAll("button, input, select, nav a, .tabs a, .stage dd a")) {
  const box = element.getBoundingClientRect();
  if (seen(element) && (box.width < 24 || box.height < 24)) found.push(`small target ${box.width}×${box.height}: ${where(element)}`);
}
const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
for (const id of ids.filter((id, index) => ids.indexOf(id) !== index)) found.push(`id ${id} twice`);
if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
let level = 1;
for (const heading of document.querySelectorAll("main h1, main h2, main h3")) {
  const now = Number(heading.tagName[1]);
  if (now > level + 1) found.push(`heading skips a level: ${where(heading)}`);
  level = now;
}
for (const table of document.querySelectorAll("table")) {
  if (!table.caption) found.push("a table without a caption");
  if ([...table.querySelectorAll("th")].some((th) => !th.scope || !th.textContent)) found.push("a column without a head");
}
if (!document.documentElement.lang || !document.title) found.push("no language or title");
if (document.documentElement.scrollWidth > innerWidth) {
  const wide = [...document.querySelectorAll("body *")].filter((element) => element.getBoundingClientRect().right > innerWidth + 1 && seen(element) && !element.parentElement.closest(".scroll, pre"));
  found.push(`wider than the screen: ${wide.slice(0, 3).map(where).join(" | ")}`);
}
return found;
"##;

async fn start() -> (TestDb, Server, Browser) {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let browser = Browser::open(&server.url).await;
    (db, server, browser)
}

/// Some of everything, so that no page is bare.
async fn furnish(server: &Server) -> Value {
    let order = server.place_and_wait("alice", &[("WIDGET-A", 2), ("GADGET-X", 1)]).await;
    server.place_and_wait("bob", &[("GADGET-X", 11)]).await;
    server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "this is no JSON" })).await;
    server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body_base64": "//79" })).await;
    server.eventually_list("/v1/dead-letters", 2).await;
    server.eventually_list("/v1/notifications", 2).await;
    order
}

#[tokio::test]
async fn every_page_reads_well_light_and_dark_wide_and_narrow() {
    let (_db, server, browser) = start().await;
    let order = furnish(&server).await;
    let letter = server.read("/v1/dead-letters").await["data"][0]["id"].as_str().unwrap().to_owned();
    let mut pages: Vec<String> = PAGES.map(str::to_owned).into();
    pages.push(format!("/orders/{}?view=bars", order["number"].as_str().unwrap()));
    pages.push(format!("/dead-letters/{letter}"));
    let mut stumbles = Vec::new();
    // Widths do not depend on colours, nor colours on widths: two rounds see all four.
    for (width, dark) in [(1280, false), (320, true)] {
        browser.look(width, 900, dark).await;
        for page in &pages {
            browser.visit(page).await;
            let settled = "return !document.querySelector('main [aria-busy]') && !/Looking…|Checking/.test(document.querySelector('main').textContent)";
            browser.until(&format!("{page} to settle"), settled).await;
            for stumble in browser.run(STUMBLES).await.as_array().unwrap() {
                stumbles.push(format!("{page} at {width}, dark {dark}: {}", stumble.as_str().unwrap()));
            }
            assert_eq!(browser.recorded().await, json!([]), "{page}");
        }
        let ground =
            browser.run("return Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])").await;
        assert_eq!(ground.as_i64().unwrap() < 60, dark, "the ground is {ground}");
        let picture = browser.screenshot().await;
        assert!(picture.starts_with(b"\x89PNG") && picture.len() > 5000, "a picture with something on it");
    }
    assert!(stumbles.is_empty(), "{} to stumble over:\n{}", stumbles.len(), stumbles.join("\n"));
    browser.close().await;
    assert!(server.terminate().await);
}

#[tokio::test]
async fn hostile_texts_stay_texts() {
    let (_db, server, browser) = start().await;
    let mut orders = Vec::new();
    for text in HOSTILE {
        let put =
            server.client.put(format!("{}/v1/stock/{}", server.url, escaped(text))).json(&json!({ "on_hand": 5 }));
        let takes_the_sku = put.send().await.unwrap().status().is_success();
        let sku = if takes_the_sku { text } else { "WIDGET-A" };
        orders.push(server.place_and_wait(text, &[(sku, 1)]).await["number"].as_str().unwrap().to_owned());
        server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": text, "message_id": text })).await;
        // What a parser says of it, and a header of it, are shown too.
        let event = json!({ "event_id": text, "event_type": text, "payload": { text: text } }).to_string();
        server.tell("/v1/lab/publish", &json!({ "queue": "orders", "body": event, "headers": { text: text } })).await;
    }
    let letters = server.eventually_list("/v1/dead-letters", 2 * HOSTILE.len()).await;
    let mut pages: Vec<String> = PAGES.map(str::to_owned).into();
    pages.extend(orders.iter().map(|number| format!("/orders/{number}?view=raw")));
    pages.extend(orders.iter().map(|number| format!("/orders/{number}")));
    pages.extend(letters.iter().map(|letter| format!("/dead-letters/{}", letter["id"].as_str().unwrap())));
    pages.push(format!("/orders?customer_id={}", escaped(HOSTILE[1])));
    pages.push(format!("/dead-letters?reason={}", escaped(HOSTILE[0])));
    for page in &pages {
        browser.visit(page).await;
        browser.until("the page to settle", "return !document.querySelector('main [aria-busy]')").await;
        let state = browser
            .run("return [window.pwned ?? null, document.querySelectorAll('main script, main iframe, main svg[onload], main img').length, [...document.querySelectorAll('a[href]')].filter((a) => a.protocol === 'javascript:').length, window.recorded]")
            .await;
        assert_eq!(state, json!([null, 0, 0, []]), "{page}");
    }
    // And they are shown, to the letter.
    browser.visit("/orders").await;
    for text in HOSTILE {
        browser.until_reads("main td", text).await;
    }
    for letter in letters.iter().filter(|letter| letter["consumer"] == "inventory") {
        browser.visit(&format!("/dead-letters/{}", letter["id"].as_str().unwrap())).await;
        let shown = browser.text("#payload pre").await;
        assert!(HOSTILE.contains(&shown.as_str()), "{shown}");
    }
    browser.close().await;
    assert!(server.terminate().await);
}

fn escaped(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}
