//! What people do on the dashboard, done in a real browser on the running binary.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use stockade::access::Secret;

use super::{close, start};
use crate::support::{Browser, Engine, Server, TestDb, eventually};

#[tokio::test(crate = "crate::support::schedule")]
async fn an_order_is_seen_reserved_without_reloading() {
    let (_db, server, browser) = start(&[]).await;
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
    browser.until_reads("main", "Reserved, waits for payment until").await;
    browser.until_reads("#timeline", "inventory dealt with order.placed").await;
    browser.click(".tabs a[href$='view=bars']").await;
    browser.until("bars", "return document.querySelectorAll('.bar-row').length >= 4").await;
    browser.back().await;
    browser.back().await;
    browser.until_reads("h1", "Overview").await;
    assert_eq!(browser.run("return window.loadedOnce").await, true);
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn a_paused_consumer_is_seen_and_its_queue_climbs_and_drains() {
    let (_db, server, browser) = start(&[]).await;
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
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn poison_is_made_seen_read_and_redriven() {
    let (_db, server, browser) = start(&[]).await;
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
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn search_and_keys_lead_everywhere() {
    let (_db, server, browser) = start(&[]).await;
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
    close(server, browser).await;
}

/// Types words into the search box and waits for where they lead.
async fn jump(browser: &Browser, words: &str, to: &str) {
    browser.run("document.activeElement.blur()").await;
    browser.press("/").await;
    browser.press(&format!("{words}\u{e007}")).await;
    let there = format!("return location.pathname + location.search === {}", json!(to));
    browser.until(&format!("{words} to lead to {to}"), &there).await;
    browser.until_reads("main h1", "").await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn search_finds_everything_that_has_a_name() {
    const CUSTOMER: &str = "0190a000-0000-7000-8000-0000000000cc";
    const EVENT: &str = "0190a000-0000-7000-8000-0000000000ee";
    const CORRELATION: &str = "0190a000-0000-7000-8000-0000000000dd";
    let (_db, server, browser) = start(&[]).await;
    let body =
        json!({ "customer_id": CUSTOMER, "items": [{ "sku": "WIDGET-A", "quantity": 1, "unit_price_minor": 5 }] });
    let placed = server.post("/v1/orders", &body).header("prefer", "wait=20").send().await.unwrap();
    let order: Value = placed.json().await.unwrap();
    let id = |value: &Value| value.as_str().unwrap().to_owned();
    let (order_id, number) = (id(&order["id"]), id(&order["number"]));
    assert!(server.pay(&order_id, 5).await.status().is_success());
    server.eventually_list("/v1/ledger/entries", 2).await;
    let envelope = json!({
        "event_id": EVENT, "occurred_at": "2026-11-16T09:30:00Z", "aggregate_type": "order", "event_type": "placed",
        "aggregate_id": EVENT, "group_id": order["group_id"], "correlation_id": CORRELATION, "payload": {},
    });
    server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": envelope.to_string() })).await;
    let letter = server.eventually_list("/v1/dead-letters?state=open", 1).await[0].clone();
    let notice = server.eventually_list("/v1/notifications", 2).await[0].clone();
    let redrive = server.tell("/v1/redrives", &json!({ "reason": "none-such" })).await;
    let replay = server.tell("/v1/replays", &json!({ "from": "2999-01-01T00:00:00Z" })).await;
    let reservation = server.read("/v1/reservations").await["data"][0].clone();
    let event = server.read("/v1/inbox?consumer=ledger").await["data"][0]["event_id"].clone();
    browser.visit("/settings").await;
    let to_order = format!("/orders/{number}");
    // Never twice in a row to the same page: nothing would show that the first search has ended.
    for (words, to) in [
        (number.clone(), to_order.clone()),
        (id(&reservation["number"]), format!("/orders/{order_id}")),
        (order_id.clone(), to_order),
        (id(&reservation["id"]), format!("/orders/{order_id}")),
        (id(&event), format!("/inbox?event_id={}", id(&event))),
        (id(&letter["id"]), format!("/dead-letters/{}", id(&letter["id"]))),
        (id(&redrive["id"]), format!("/dead-letters?redrive={}", id(&redrive["id"]))),
        (id(&replay["id"]), "/replays".to_owned()),
        (id(&notice["id"]), format!("/notifications?order_id={order_id}")),
        (CUSTOMER.to_owned(), format!("/orders?customer_id={CUSTOMER}")),
        (id(&order["correlation_id"]), format!("/orders?correlation_id={}", id(&order["correlation_id"]))),
        (CORRELATION.to_owned(), format!("/dead-letters?correlation_id={CORRELATION}")),
        (id(&letter["reason"]), format!("/dead-letters?reason={}", id(&letter["reason"]))),
        ("WIDGET-B".to_owned(), "/stock?sku=WIDGET-B".to_owned()),
        ("cash".to_owned(), "/ledger?account=cash".to_owned()),
        ("inventory".to_owned(), "/queues".to_owned()),
    ] {
        jump(&browser, &words, &to).await;
    }
    browser.press("/").await;
    browser.press("0190a000-0000-7000-8000-00000000ffff\u{e007}").await;
    browser.until_reads("#toasts", "Nothing here is called").await;
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn books_of_which_only_a_part_is_shown_are_not_called_unbalanced() {
    let (db, server, browser) = start(&[]).await;
    let paid = server.reserve("WIDGET-A", 5).await;
    assert!(server.pay(&paid, 5).await.status().is_success());
    server.eventually_list("/v1/ledger/entries", 2).await;
    browser.visit("/ledger").await;
    browser.until_reads("main .badge", "USD: sums to zero").await;
    // As after payments of two hundred and ten more customers.
    db.sqlite()
        .execute_batch(
            "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 210),
              e AS (SELECT n, randomblob(16) AS event FROM n),
              one AS (SELECT group_id, order_id, currency, created_at FROM ledger_entries LIMIT 1)
         INSERT INTO ledger_entries (group_id, id, order_id, event_id, account, amount_minor, currency, created_at)
         SELECT group_id, randomblob(16), order_id, event, 'customer:c' || n, 5, currency, created_at FROM e, one
         UNION ALL
         SELECT group_id, randomblob(16), order_id, event, 'cash', -5, currency, created_at FROM e, one",
        )
        .unwrap();
    browser.visit("/ledger").await;
    browser.until_reads("main", "The first 200 accounts").await;
    assert_eq!(browser.run("return document.querySelectorAll('main .badge').length").await, 0);
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn bytes_that_are_no_text_are_counted_where_they_are_cut() {
    let (_db, server, browser) = start(&[]).await;
    for size in [20_000, 3] {
        let bytes = STANDARD.encode(vec![0xff_u8; size]);
        server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body_base64": bytes })).await;
        let letters = server.eventually_list("/v1/dead-letters?state=open", 1).await;
        let path = format!("/dead-letters/{}", letters[0]["id"].as_str().unwrap());
        browser.visit(&path).await;
        browser.until_reads("#payload pre", "00000000  ff ff ff").await;
        // What is saved is what came.
        browser.run("window.saved = []; const make = URL.createObjectURL; URL.createObjectURL = (blob) => { window.saved.push(blob.size); return make(blob); }").await;
        browser.click("#payload .tools button:nth-of-type(2)").await;
        assert_eq!(browser.run("return window.saved").await, json!([size]));
        let cut = browser.text("#payload").await.contains("The first 16,384 of 20,000 bytes are shown");
        assert_eq!(cut, size == 20_000);
        server.tell(&format!("/v1{path}/discard"), &json!({ "reason": "seen" })).await;
    }
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn whoever_leaves_a_demo_leaves_nothing_paused() {
    let (_db, server, browser) = start(&[]).await;
    browser.visit("/lab").await;
    browser.until_reads("#invariants", "promises kept").await;
    let paused = |wanted: bool| {
        let server = &server;
        eventually("inventory to be paused, or not", move || async move {
            (server.read("/v1/queues/inventory").await["paused"] == wanted).then_some(())
        })
    };
    for leave in ["document.querySelector('nav a[href=\"/orders\"]').click()", "location.assign('/settings')"] {
        // The queue never holds what the demo waits for, so it is in the middle of it for as long as need be.
        server.tell("/v1/consumers/relay/pause", &json!({})).await;
        browser.visit("/lab").await;
        browser.click("#demo-backlog button").await;
        browser.until_reads("#demo-backlog li.doing", "The queue holds all of them").await;
        paused(true).await;
        browser.run(leave).await;
        paused(false).await;
        server.tell("/v1/consumers/relay/resume", &json!({})).await;
    }
    browser.visit("/").await;
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn a_tenant_sees_its_own_live_and_no_dead_ends() {
    let db = TestDb::new(Engine::Sqlite).await;
    let [acme, viewer, platform] = [Secret::random(), Secret::random(), Secret::random()];
    let keys = format!("admin:acme:{},viewer:acme:{},admin:*:{}", acme.hash(), viewer.hash(), platform.hash());
    let server = Server::start(&db, &["--api-keys", &keys]);
    let (acme_api, platform) = (server.with_key(acme.reveal()), server.with_key(platform.reveal()));
    acme_api.put_stock("ACME-A", 5).await;
    let browser = Browser::open(&server.url).await;
    let log_in = async |key: &Secret| {
        browser.open_page("/login").await;
        browser.click("#key").await;
        browser.press(&format!("{}\n", key.reveal())).await;
        browser.until_reads("main h1", "Overview").await;
        browser.until_reads("#live", "Live").await;
    };
    log_in(&acme).await;
    browser.until_reads("main", "needs a key for every group").await;
    let there = async |selector: &str| {
        let seen = format!(
            "return [...document.querySelectorAll({})].filter((found) => found.checkVisibility()).length",
            json!(selector)
        );
        browser.run(&seen).await != 0
    };
    assert!(!there("#invariants").await && !there(".road").await, "what it cannot see is not there");
    for page in ["/queues", "/replays", "/audit", "/lab"] {
        assert!(!there(&format!("[data-page='{page}']")).await, "{page}");
    }
    assert!(there("[data-page='/dead-letters']").await);
    browser.click("#test-order").await;
    browser.until_reads("#live-reservations td", "RES-").await;
    for page in ["/queues", "/replays", "/audit", "/lab"] {
        browser.visit(page).await;
        browser.until_reads("main .empty", "This needs a key for every group").await;
    }
    // Its letters come in by themselves, though nobody tells it of queues.
    browser.visit("/dead-letters").await;
    browser.until_reads(".list .empty", "No dead letters").await;
    assert!(!there(".list .empty a[href='/lab']").await);
    let envelope = json!({
        "event_id": "0190a000-0000-7000-8000-0000000000aa", "occurred_at": "2026-11-16T09:30:00Z",
        "aggregate_type": "order", "aggregate_id": "0190a000-0000-7000-8000-0000000000aa", "event_type": "placed",
        "group_id": "acme", "correlation_id": "c", "payload": {},
    });
    platform.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": envelope.to_string() })).await;
    browser.until_reads(".list td", "schema").await;
    assert_eq!(browser.run("return [...document.querySelector('select[name=consumer]').options].length").await, 5);
    // A search that meets what is not for tenants goes on.
    browser.press("/").await;
    browser.press("inventory\u{e007}").await;
    browser.until_reads("#toasts", "Nothing here is called").await;
    log_in(&viewer).await;
    assert!(!there("#test-order").await, "a viewer only looks");
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn stock_is_adjusted_and_a_refusal_is_told_in_words() {
    let (_db, server, browser) = start(&[]).await;
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
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn an_order_is_paid_and_fulfilled_on_its_page_and_another_cancelled() {
    let (_db, server, browser) = start(&[]).await;
    browser.visit("/orders").await;
    for (sku, last) in [("WIDGET-A", "fulfilled"), ("WIDGET-B", "cancelled")] {
        browser.click("nav a[href='/orders']").await;
        browser.until_reads("h1", "Orders").await;
        browser.click("main .primary").await;
        browser.until("the shelves", "return document.querySelector('dialog select[name=sku]') !== null").await;
        browser.run(&format!("document.querySelector('dialog [name=sku]').value = '{sku}'")).await;
        browser.click("dialog button[type=submit]").await;
        browser.until_reads("#waiting", "Reserved, waits for payment until").await;
        if last == "fulfilled" {
            browser.click("main .primary").await;
            browser.until_reads("#waiting", "Paid, waits to be fulfilled").await;
            browser.until_reads("main dd", "customer:alice").await;
            browser.click("main .primary").await;
        } else {
            browser.click("main .row.top button:not(.primary)").await;
            browser.until_reads("dialog", "goes back on the shelf").await;
            browser.click("dialog button[type=submit]").await;
        }
        browser.until_reads("#waiting", &format!("Waits for nothing: it is {last}")).await;
        browser.until_reads(".steps [aria-current]", last).await;
    }
    browser.until_reads("#timeline", "reservation").await;
    browser.click(".tabs a[href$='view=raw']").await;
    browser.until_reads("#timeline pre", "\"waiting_for\"").await;
    // The books of the one that was paid.
    browser.click("nav a[href='/ledger']").await;
    browser.until_reads("main .badge", "USD: sums to zero").await;
    browser.click("main .list a[href*='account=cash']").await;
    browser
        .until(
            "one entry",
            "return location.search === '?account=cash' && document.querySelectorAll('.list tbody tr').length === 1",
        )
        .await;
    browser.until_reads(".list td", "$12.50").await;
    assert_eq!(server.stock("WIDGET-A").await, (99, 0));
    assert_eq!(server.stock("WIDGET-B").await, (50, 0));
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn letters_of_a_kind_are_redriven_after_a_dry_run_or_discarded_with_a_reason_on_record() {
    let (_db, server, browser) = start(&[]).await;
    for body in ["no JSON at all", "neither is this"] {
        server.tell("/v1/lab/publish", &json!({ "queue": "inventory", "body": body })).await;
    }
    server.eventually_list("/v1/dead-letters?state=open", 2).await;
    browser.visit("/settings").await;
    browser.run("const field = document.querySelector('main input'); field.value = 'dora'; field.dispatchEvent(new Event('change'))").await;
    browser.click("nav a[href='/dead-letters']").await;
    browser.click("[aria-label='Redrive all not-json of inventory']").await;
    browser.until_reads("dialog", "2 letters found. 2 would go back").await;
    assert!(server.read("/v1/redrives").await["data"].as_array().unwrap().is_empty(), "nothing before the answer");
    browser.run("document.querySelector('dialog [name=why]').value = 'the producer is mended'").await;
    browser.click("dialog button[type=submit]").await;
    browser.until_reads("#toasts", "On their way").await;
    browser.click("nav a[href='/redrives']").await;
    browser.until_reads(".list td", "2 of 2 sent").await;
    browser.until_reads(".list td", "dora: the producer is mended").await;
    // Nothing was mended: they are back, and now discarded.
    server.eventually_list("/v1/dead-letters?state=open", 2).await;
    browser.click("nav a[href='/dead-letters']").await;
    browser.click("[aria-label='Discard all not-json of inventory']").await;
    browser.until_reads("dialog", "2 letters will not be dealt with").await;
    browser.click("dialog button[type=submit]").await;
    assert_eq!(browser.run("return document.querySelector('dialog [name=reason]').matches(':invalid')").await, true);
    browser.run("document.querySelector('dialog [name=reason]').value = 'a test of ours'").await;
    browser.click("dialog button[type=submit]").await;
    browser.until_reads("#toasts", "2 letters discarded").await;
    let discarded = server.eventually_list("/v1/dead-letters?state=discarded", 2).await;
    browser.until_reads("#groups", "None is open").await;
    // One of them is wanted after all.
    browser.visit(&format!("/dead-letters/{}", discarded[0]["id"].as_str().unwrap())).await;
    browser.until_reads("main td", "a test of ours").await;
    browser.click("main .row button").await;
    browser.until_reads(".badge", "open").await;
    server.eventually_list("/v1/dead-letters?state=open", 1).await;
    browser.click("nav a[href='/actions']").await;
    for words in ["started a redrive", "discarded a letter", "restored a letter", "a test of ours"] {
        browser.until_reads(".list td", words).await;
    }
    assert!(server.read("/v1/actions").await["data"].as_array().unwrap().iter().all(|row| row["who"] == "dora"));
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn events_are_replayed_after_a_dry_run_and_change_nothing() {
    let (_db, server, browser) = start(&[]).await;
    server.place_and_wait("alice", &[("WIDGET-A", 3)]).await;
    server.eventually_list("/v1/notifications", 1).await;
    browser.visit("/replays").await;
    browser.run("document.querySelector('main select[name=consumer]').value = 'inventory'").await;
    browser.click("main .primary").await;
    browser.until_reads("dialog", "1 event would be sent again to inventory").await;
    browser.click("dialog button[type=submit]").await;
    browser.until_reads(".list .badge", "done").await;
    browser.until_reads(".list td", "1 of 1 sent").await;
    browser.click("nav a[href='/inbox']").await;
    browser.until("the filters", "return document.querySelector('main select[name=consumer]') !== null").await;
    browser.visit("/inbox?min_duplicates=1").await;
    browser.until_reads(".list td", "order.placed").await;
    assert_eq!(server.stock("WIDGET-A").await, (100, 3));
    browser.click("nav a[href='/audit']").await;
    browser.until_reads(".headline", "promises hold").await;
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn filters_are_in_the_address_and_the_way_back_undoes_them() {
    let (_db, server, browser) = start(&[]).await;
    server.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    server.place_and_wait("bob", &[("GADGET-X", 11)]).await;
    let rows = |count: u32| format!("return document.querySelectorAll('.list tbody tr').length === {count}");
    browser.visit("/orders").await;
    browser.until("both orders", &rows(2)).await;
    browser.run("const field = document.querySelector('[name=status]'); field.value = 'rejected'; field.dispatchEvent(new Event('change'))").await;
    browser.until("the rejected one", "return location.search === '?status=rejected'").await;
    browser.until("one row", &rows(1)).await;
    browser.until_reads(".list td", "Insufficient GADGET-X: need 11, have 10").await;
    browser.click(".list a[href*=customer_id]").await;
    browser.until("the customer", "return location.search === '?customer_id=bob'").await;
    browser.back().await;
    browser.until("the filter before", "return document.querySelector('[name=status]')?.value === 'rejected'").await;
    browser.back().await;
    browser.until("no filter", &rows(2)).await;
    browser.visit("/orders?status=paid").await;
    browser.until_reads(".empty", "No orders like that").await;
    browser.click(".empty button").await;
    browser.until("all of them", &rows(2)).await;
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn a_hidden_page_rests_and_a_server_without_streams_is_polled() {
    let (_db, server, browser) = start(&["--sse-max-streams", "1"]).await;
    browser.visit("/").await;
    browser.until_reads("#live", "Live").await;
    let streams = || async { server.get("/v1/events").send().await.unwrap().status().as_u16() };
    assert_eq!(streams().await, 503, "the page holds the one stream there is");
    let hide = |hidden: bool| {
        format!(
            "Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }}); document.dispatchEvent(new Event('visibilitychange'))"
        )
    };
    browser.run(&hide(true)).await;
    browser.until_reads("#live", "Resting").await;
    // Its place is free, and taken here.
    let held = eventually("the place of a page at rest", || async {
        let response = server.get("/v1/events").send().await.unwrap();
        (response.status() == 200).then_some(response)
    })
    .await;
    server.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    browser.run(&hide(false)).await;
    browser.until_reads("#live", "Live, every 5 s").await;
    browser.until_reads("#live-reservations td", "RES-").await;
    server.place_and_wait("bob", &[("WIDGET-A", 1)]).await;
    browser
        .until("the next look", "return document.querySelectorAll('#live-reservations tbody tr').length === 2")
        .await;
    drop(held);
    close(server, browser).await;
}

/// The address of a server, for one that takes its place.
fn address(server: &Server) -> String {
    server.url.trim_start_matches("http://").to_owned()
}

#[tokio::test(crate = "crate::support::schedule")]
async fn a_page_says_that_the_server_is_away_and_goes_on_when_it_is_back() {
    let (db, server, browser) = start(&[]).await;
    browser.visit("/").await;
    browser.until_reads("#headline", "All clear").await;
    let listen = address(&server);
    assert!(server.terminate().await, "an open page does not hold it up");
    browser.until_reads("#headline", "The server cannot be reached").await;
    browser.until_reads("#live", "Server away").await;
    let server = Server::start(&db, &["--listen", &listen]);
    server.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    browser.until_reads("#live-reservations td", "RES-").await;
    browser.until_reads("#headline", "All clear").await;
    close(server, browser).await;
}

#[tokio::test(crate = "crate::support::schedule")]
async fn the_demos_tick_themselves_off() {
    // A dead process's messages come back when its lease is over.
    let (db, mut server, browser) = start(&["--lease", "3s"]).await;
    browser.visit("/lab").await;
    browser.until_reads("#invariants", "promises kept").await;
    for demo in ["backlog", "duplicates", "poison", "crash"] {
        browser.click(&format!("#demo-{demo} button")).await;
        if demo == "crash" {
            let listen = address(&server);
            assert!(!server.ended().await.success());
            browser.until_reads("#demo-crash li.doing", "Start it again").await;
            server = Server::start(&db, &["--listen", &listen, "--lease", "3s"]);
        }
        browser
            .until(demo, &format!("return document.querySelector('#demo-{demo} .outcome').textContent !== ''"))
            .await;
        let left = format!("return document.querySelectorAll('#demo-{demo} li:not(.done)').length");
        assert_eq!(browser.run(&left).await, 0, "{}", browser.text(&format!("#demo-{demo}")).await);
    }
    browser.until_reads("#invariants", "promises kept").await;
    close(server, browser).await;
}
