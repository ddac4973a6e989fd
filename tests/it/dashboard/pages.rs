//! Every page, as everybody sees it: light and dark, wide and narrow, with a keyboard, with hostile texts.
//!
//! axe-core judges what a real browser drew; what it cannot see, such as a page wider than its screen, is checked here.

use serde_json::{Value, json};

use super::{close, start};
use crate::support::{Browser, Server};

const AXE: &str = include_str!("../../vendor/axe-core/axe.min.js");

const PAGES: [&str; 16] = [
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
    "/redrives",
    "/replays",
    "/audit",
    "/actions",
    "/lab",
    "/settings",
];

/// How each page is viewed: a width in CSS pixels, whether the theme is dark, and what axe checks there. Contrast is all
/// that a theme changes, and the layout is all that the middle width changes.
const VIEWS: [(u32, bool, Axe); 5] = [
    (1280, false, Axe::Everything),
    (1280, true, Axe::Contrast),
    (768, true, Axe::Nothing),
    (320, true, Axe::Everything),
    (320, false, Axe::Contrast),
];

#[derive(Clone, Copy, PartialEq)]
enum Axe {
    Everything,
    Contrast,
    Nothing,
}

/// What axe finds: WCAG 2.2 A and AA and its own best practices, with the one rule of 2.2 that is off by default.
const FINDINGS: &str = r##"
const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
const everything = { runOnly: { type: "tag", values: tags }, rules: { "target-size": { enabled: true } } };
const contrast = { runOnly: { type: "rule", values: ["color-contrast"] } };
axe.run(document, { ...(all ? everything : contrast), resultTypes: ["violations"] })
  .then(({ violations, passes }) => done(violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.target.join(" ")} ${node.any.map((check) => check.message).join("; ").slice(0, 200)}`))
    .concat(passes.length > (all ? 10 : 0) ? [] : ["axe hardly looked"])), (error) => done([String(error)]));
"##;

/// What axe does not look for: sideways scrolling, more than one title, and columns without a head.
const STUMBLES: &str = r##"
const found = [];
const seen = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && !element.closest(".unseen, .skip");
if (document.documentElement.scrollWidth > innerWidth) {
  const wide = [...document.querySelectorAll("body *")].filter((element) => element.getBoundingClientRect().right > innerWidth + 1 && seen(element) && !element.parentElement.closest(".scroll, pre"));
  found.push(`wider than the screen: ${wide.slice(0, 3).map((element) => `${element.tagName}.${element.className}`).join(" | ")}`);
}
if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
for (const table of document.querySelectorAll("table")) {
  if (!table.caption || [...table.querySelectorAll("th")].some((head) => !head.scope || !head.textContent)) found.push(`a table without a caption or a head: ${table.textContent.slice(0, 40)}`);
}
return found;
"##;

const SETTLED: &str = "return !document.querySelector('main [aria-busy]') && !/Looking…|Checking|Not checked yet/.test(document.querySelector('main').textContent)";

/// Some of everything, so that no page is bare. Returns the pages of single things.
async fn furnish(server: &Server) -> Vec<String> {
    let order = server.place_and_wait("alice", &[("WIDGET-A", 2), ("GADGET-X", 1)]).await;
    server.place_and_wait("bob", &[("GADGET-X", 11)]).await;
    let paid = server.reserve("WIDGET-B", 1250).await;
    assert!(server.pay(&paid, 1250).await.status().is_success());
    server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": "this is no JSON" })).await;
    server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body_base64": "//79" })).await;
    let letters = server.eventually_list("/v1/dead-letters", 2).await;
    let discarded = letters[1]["id"].as_str().unwrap();
    server.tell(&format!("/v1/dead-letters/{discarded}/discard"), &json!({ "reason": "a test of ours" })).await;
    server.tell("/v1/replays", &json!({ "from": "2026-01-01T00:00:00Z", "consumer": "ledger" })).await;
    server.tell("/v1/redrives", &json!({ "reason": "no-such-reason" })).await;
    server.eventually_list("/v1/notifications", 4).await;
    server.eventually_list("/v1/ledger/entries", 2).await;
    server.tell("/v1/consumers/ledger/pause", &json!({})).await;
    let number = order["number"].as_str().unwrap();
    let mut pages: Vec<String> = ["", "?view=bars", "?view=raw"].map(|view| format!("/orders/{number}{view}")).into();
    pages.push(format!("/orders/{paid}"));
    pages.extend(letters.iter().map(|letter| format!("/dead-letters/{}", letter["id"].as_str().unwrap())));
    pages
}

/// What a reader would stumble over on the current page, in every view of it.
async fn stumbles(browser: &Browser, page: &str) -> Vec<String> {
    let mut found = Vec::new();
    browser.run(AXE).await;
    for (width, dark, axe) in VIEWS {
        browser.look(width, 900, dark).await;
        let shown = format!(
            "return innerWidth === {width} && matchMedia('(prefers-color-scheme: dark)').matches === {dark}
                 && !document.getAnimations().some((animation) => animation instanceof CSSTransition)"
        );
        browser.until(&format!("{page} at {width}"), &shown).await;
        let mut of_view = vec![browser.run(STUMBLES).await];
        if axe != Axe::Nothing {
            let all = axe == Axe::Everything;
            let findings = format!("const done = arguments[0], all = {all};\n{FINDINGS}");
            of_view.push(browser.run_async(&findings).await);
        }
        let texts = of_view.iter().flat_map(|all| all.as_array().unwrap()).map(|one| one.as_str().unwrap());
        found.extend(texts.map(|text| format!("{page} at {width}, dark {dark}: {text}")));
        let background = "return Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])";
        let background = browser.run(background).await.as_i64().unwrap();
        assert_eq!(background < 60, dark, "{page}: the background is {background}");
    }
    found
}

#[tokio::test(crate = "crate::support::schedule")]
async fn every_page_is_accessible_at_every_width_in_both_themes() {
    let (_db, server, browser) = start(&[]).await;
    let mut pages: Vec<String> = PAGES.map(str::to_owned).into();
    pages.extend(furnish(&server).await);
    let mut found = Vec::new();
    for page in &pages {
        browser.visit(page).await;
        browser.until(&format!("{page} to settle"), SETTLED).await;
        found.extend(stumbles(&browser, page).await);
        assert_eq!(browser.recorded().await, json!([]), "{page}");
    }
    // The login is a page of its own, on a server with keys or without.
    browser.open_page("/login").await;
    browser.until_reads("label", "API key").await;
    found.extend(stumbles(&browser, "/login").await);
    // Dialogs count as well.
    for (page, opens, shows) in [
        ("/orders", "main .primary", "dialog [name=customer_id]"),
        ("/stock", "[aria-label='Adjust WIDGET-A']", "dialog [name=delta]"),
        ("/dead-letters", "#groups [aria-label^=Redrive]", "dialog [name=rate]"),
        ("/dead-letters", "#groups [aria-label^=Discard]", "dialog [name=reason]"),
    ] {
        browser.visit(page).await;
        browser.click(opens).await;
        browser.until(shows, &format!("return document.querySelector({}) !== null", json!(shows))).await;
        found.extend(stumbles(&browser, shows).await);
    }
    for (width, dark, _) in VIEWS {
        browser.look(width, 900, dark).await;
        let picture = browser.screenshot().await;
        assert!(picture.starts_with(b"\x89PNG") && picture.len() > 5000, "a picture with something on it");
    }
    assert!(found.is_empty(), "{} to stumble over:\n{}", found.len(), found.join("\n"));
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn whoever_asked_for_less_motion_gets_none() {
    let (_db, server, browser) = start(&[]).await;
    let moving = "return document.getAnimations().filter((animation) => animation.playState === 'running').length";
    for (reduced, least, most) in [(false, 1, 10), (true, 0, 0)] {
        browser.calm(reduced).await;
        browser.visit("/").await;
        browser.until_reads("#live", "Live").await;
        browser.click("#test-order").await;
        browser.until_reads("#toasts", "Placed").await;
        let running = browser.run(moving).await.as_i64().unwrap();
        assert!((least..=most).contains(&running), "{running} in motion, reduced {reduced}");
    }
    close(server, browser).await;
}

/// Texts that become something else where a page is careless: as markup, as an attribute, as an address, as a style, as
/// a template, after decoding twice, after a parser has mended them, or by turning the line around.
const HOSTILE: [&str; 14] = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror=\"window.pwned = 2\">",
    "\"><svg onload=window.pwned=3>",
    "javascript:window.pwned=4",
    "'-alert(1)-'${window.pwned=5}{{7*7}}",
    "</textarea></title><iframe srcdoc='<script>parent.pwned=6</script>'>",
    "' autofocus onfocus=window.pwned=7 x='",
    "&lt;img src=x onerror=window.pwned=8&gt;",
    "<details open ontoggle=window.pwned=9>",
    "<math><mtext><table><mglyph><style><!--</style><img src onerror=window.pwned=10>",
    "<a href=\"javascript:window.pwned=11\">click</a><base href=//evil.example>",
    "{{constructor.constructor('window.pwned=12')()}}",
    "data:text/html,<script>window.pwned=13</script>",
    "../../\u{202e}gnp.<b>x</b>%3Cscript%3E__proto__",
];

#[tokio::test(crate = "crate::support::schedule")]
async fn hostile_texts_stay_texts() {
    let (_db, server, browser) = start(&[]).await;
    let mut orders = Vec::new();
    for text in HOSTILE {
        let put = server.put(&format!("/v1/stock/{}", escaped(text)), &json!({ "on_hand": 5 }));
        let takes_the_sku = put.send().await.unwrap().status().is_success();
        let sku = if takes_the_sku { text } else { "WIDGET-A" };
        orders.push(server.place_and_wait(text, &[(sku, 1)]).await["number"].as_str().unwrap().to_owned());
        server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": text, "message_id": text })).await;
        // What a parser says of it, and a header of it, are shown too.
        let event = json!({ "event_id": text, "event_type": text, "payload": { text: text } }).to_string();
        server.tell("/v1/lab/publish", &json!({ "queue": "orders", "body": event, "headers": { text: text } })).await;
        // A filter is not checked before it is recorded, nor is a reason.
        server.tell("/v1/redrives", &json!({ "reason": text, "consumer": text, "why": text })).await;
    }
    let letters = server.eventually_list("/v1/dead-letters", 2 * HOSTILE.len()).await;
    for (letter, text) in letters.iter().zip(HOSTILE) {
        let discard = format!("/v1/dead-letters/{}/discard", letter["id"].as_str().unwrap());
        server.tell(&discard, &json!({ "reason": text })).await;
    }
    let mut loaded: Vec<String> = PAGES.map(str::to_owned).into();
    // URLs that others made, too.
    loaded.extend(HOSTILE.map(|text| format!("/orders?customer_id={0}&sku={0}", escaped(text))));
    loaded.extend(HOSTILE.map(|text| format!("/orders/{}", escaped(text))));
    loaded.push(format!("/dead-letters?reason={}", escaped(HOSTILE[0])));
    for page in &loaded {
        browser.visit(page).await;
        assert_harmless(&browser, page).await;
    }
    for number in &orders {
        for view in ["?view=raw", ""] {
            let page = format!("/orders/{number}{view}");
            browser.follow(&page).await;
            assert_harmless(&browser, &page).await;
        }
    }
    // And they are shown, to the letter.
    for letter in &letters {
        let page = format!("/dead-letters/{}", letter["id"].as_str().unwrap());
        browser.follow(&page).await;
        assert_harmless(&browser, &page).await;
        if letter["consumer"] == "inventory" {
            let shown = browser.text("#payload pre").await;
            assert!(HOSTILE.contains(&shown.as_str()), "{shown}");
        }
    }
    for page in ["/orders", "/actions"] {
        browser.follow(page).await;
        for text in HOSTILE {
            browser.until_reads("main td", text).await;
        }
    }
    // A search for one finds what bears its name, and is itself only a text.
    browser.press("/").await;
    browser.press(&format!("{}\u{e007}", HOSTILE[1])).await;
    let found =
        "return location.pathname === '/stock' && new URLSearchParams(location.search).get('sku').includes('onerror')";
    browser.until("the shelf of that name", found).await;
    assert_eq!(browser.run("return window.pwned ?? null").await, Value::Null);
    close(server, browser).await;
}

/// The current page has run nothing and has no element or link that a text could have made.
async fn assert_harmless(browser: &Browser, page: &str) {
    browser.until(&format!("{page} to settle"), "return !document.querySelector('main [aria-busy]')").await;
    let state = browser
        .run("return [window.pwned ?? null, document.querySelectorAll('main script, main iframe, main svg[onload], main img, main base, main details, main style, main [onfocus]').length, [...document.querySelectorAll('a[href]')].filter((a) => !['http:', 'https:'].includes(a.protocol)).length, window.recorded]")
        .await;
    assert_eq!(state, json!([null, 0, 0, []]), "{page}");
}

fn escaped(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}
