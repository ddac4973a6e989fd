//! What people do on the dashboard, done in a real browser on the running binary.

use serde_json::json;

use crate::support::{Browser, Engine, Server, TestDb};

async fn start() -> (TestDb, Server, Browser) {
    let db = TestDb::new(Engine::Sqlite).await;
    let server = Server::start(&db, &[]);
    let browser = Browser::open(&server.url).await;
    (db, server, browser)
}

async fn finish(server: Server, browser: Browser) {
    assert_eq!(browser.recorded().await, json!([]), "the page had nothing to complain about");
    browser.close().await;
    assert!(server.terminate().await);
}

#[tokio::test]
async fn an_order_is_seen_reserved_without_reloading() {
    let (_db, server, browser) = start().await;
    browser.visit("/").await;
    browser.until_reads("#live", "Live").await;
    browser.until_reads("#live-reservations", "Nothing is reserved yet").await;
    browser.run("window.loadedOnce = true").await;
    browser.click("#test-order").await;
    browser.until_reads("#live-reservations td", "RES-").await;
    browser.until_reads("#latest-orders td", "reserved").await;
    browser.until_reads("#headline", "All clear: 1 order in the last minute").await;
    assert_eq!(browser.run("return window.loadedOnce").await, true);
    // The rest of the road: from the list to the order, its story, and back.
    browser.click("#latest-orders tbody a").await;
    browser.until_reads("main", "It waits to be paid").await;
    browser.until_reads("#timeline", "inventory dealt with order.placed").await;
    browser.click(".tabs a[href$='view=bars']").await;
    browser.until("bars", "return document.querySelectorAll('.bar-row').length >= 4").await;
    browser.back().await;
    browser.back().await;
    browser.until_reads("h1", "Overview").await;
    assert_eq!(browser.run("return window.loadedOnce").await, true);
    finish(server, browser).await;
}

#[tokio::test]
async fn a_paused_consumer_is_seen_and_its_queue_climbs_and_drains() {
    let (_db, server, browser) = start().await;
    browser.visit("/").await;
    browser.click("[aria-label='Pause inventory']").await;
    browser.until_reads("#headline", "inventory is paused").await;
    for _ in 0..7 {
        server.place("alice", &[("WIDGET-A", 1)]).await;
    }
    browser.until_reads("[data-consumer=inventory] .figure", "7").await;
    browser.until_reads("#headline", "7 messages wait").await;
    // Paused watching: the picture stands still, whatever happens.
    browser.click("#live").await;
    browser.until_reads("#live", "Paused").await;
    server.tell("/v1/consumers/inventory/resume", &json!({})).await;
    server.eventually_list("/v1/reservations", 7).await;
    assert_eq!(browser.text("[data-consumer=inventory] .figure").await, "7");
    browser.press("p").await;
    browser.until_reads("[data-consumer=inventory] .figure", "0").await;
    browser.until_reads("#headline", "All clear").await;
    browser
        .until("the reservations", "return document.querySelectorAll('#live-reservations tbody tr').length === 7")
        .await;
    finish(server, browser).await;
}

#[tokio::test]
async fn poison_is_made_seen_read_and_redriven() {
    let (_db, server, browser) = start().await;
    browser.visit("/lab").await;
    browser.click("#fault-poison button").await;
    server.eventually_list("/v1/dead-letters?state=open", 1).await;
    browser.click("nav a[href='/']").await;
    browser.until_reads("#headline", "1 dead letter waits for you").await;
    browser.click("nav a[href='/dead-letters']").await;
    browser.click(".list tbody a").await;
    browser.until_reads("h1", "not-json: the text is no JSON").await;
    browser.until_reads("#payload pre", r#"{"event_id": "0190a000-0000-7000-8000-000000000001", "payload": {"#).await;
    browser.click("#redrive").await;
    browser.until_reads("dialog", "they will be refused again").await;
    browser.click("dialog button[type=submit]").await;
    browser.until_reads(".badge", "redriven").await;
    // Nothing mended it, so it is a letter again: closed once, open once.
    server.eventually_list("/v1/dead-letters?state=open", 1).await;
    server.eventually_list("/v1/dead-letters?state=redriven", 1).await;
    browser.visit("/dead-letters?state=redriven").await;
    browser.until("one row", "return document.querySelectorAll('.list tbody tr').length === 1").await;
    assert_eq!(browser.run("return document.querySelector('select[name=state]').value").await, "redriven");
    finish(server, browser).await;
}

#[tokio::test]
async fn search_and_keys_lead_everywhere() {
    let (_db, server, browser) = start().await;
    let order = server.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let number = order["number"].as_str().unwrap();
    let reservation = server.eventually_list("/v1/reservations", 1).await[0]["number"].as_str().unwrap().to_owned();
    browser.visit("/settings").await;
    for words in [number, &reservation, order["id"].as_str().unwrap()] {
        browser.press("g").await;
        browser.press("q").await;
        browser.until_reads("h1", "Queues and consumers").await;
        browser.press("/").await;
        browser.press(&format!("{words}\u{e007}")).await;
        browser.until_reads("h1", number).await;
    }
    browser.press("/").await;
    browser.press("WIDGET-B\u{e007}").await;
    browser
        .until(
            "the shelf",
            "return location.search === '?sku=WIDGET-B' && document.querySelectorAll('main tbody tr').length === 1",
        )
        .await;
    browser.run("document.activeElement.blur()").await;
    browser.press("g").await;
    browser.press("o").await;
    browser.until("the row", "return document.querySelector('main tbody a') !== null").await;
    browser.press("j").await;
    browser.press("\u{e007}").await;
    browser.until_reads("h1", number).await;
    browser.press("?").await;
    browser.until_reads("dialog", "next and previous row").await;
    finish(server, browser).await;
}

#[tokio::test]
async fn stock_is_adjusted_and_a_refusal_is_told_in_words() {
    let (_db, server, browser) = start().await;
    server.place_and_wait("alice", &[("GADGET-X", 4)]).await;
    browser.visit("/stock?sku=GADGET-X").await;
    browser.click("[aria-label='Adjust GADGET-X']").await;
    browser.run("document.querySelector('dialog [name=delta]').value = '-7'; document.querySelector('dialog [name=reason]').value = 'broken'").await;
    browser.click("dialog button[type=submit]").await;
    browser.until("the refusal", "return document.querySelector('dialog .problem').textContent.length > 10").await;
    browser.run("document.querySelector('dialog [name=delta]').value = '-6'").await;
    browser.click("dialog button[type=submit]").await;
    browser.until_reads("#toasts", "GADGET-X: 4 on hand, 0 available").await;
    assert_eq!(server.stock("GADGET-X").await, (4, 4));
    finish(server, browser).await;
}

#[tokio::test]
async fn the_demos_tick_themselves_off() {
    let (_db, server, browser) = start().await;
    browser.visit("/lab").await;
    for demo in ["backlog", "duplicates", "poison"] {
        browser.click(&format!("#demo-{demo} button")).await;
        browser.until_reads(&format!("#demo-{demo} .outcome"), "proven").await;
        let left = format!("return document.querySelectorAll('#demo-{demo} li:not(.done)').length");
        assert_eq!(browser.run(&left).await, 0, "{}", browser.text(&format!("#demo-{demo}")).await);
    }
    finish(server, browser).await;
}
