//! Links to the broker and to Postgres that are reset or half-open under load.

use super::brokers::until_broker_is;
use super::databases::until_well;
use super::{IMPATIENT, Shop, until_more_orders};
use crate::support::{Engine, OwnPostgres, Proxy, TestDb, Wire, eventually};

/// The same broker queues, reached through a proxy.
async fn proxy_to_broker(db: &TestDb) -> (Proxy, TestDb) {
    let Wire::Rabbit { url, prefix } = &db.wire else { unreachable!() };
    let proxy = Proxy::to(url.rsplit(':').next().unwrap().parse().unwrap()).await;
    let wire = Wire::Rabbit { url: proxy.url(url), prefix: prefix.clone() };
    let link = TestDb::at(db.url.clone()).over(wire);
    (proxy, link)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_reset_of_the_broker_link_costs_nothing() {
    let db = TestDb::on_rabbit(Engine::Sqlite).await;
    let (proxy, link) = proxy_to_broker(&db).await;
    let mut shop = Shop::open_through(&db, &link, &[]).await;
    let api = shop.api();
    shop.place_during(async {
        for _ in 0..3 {
            until_more_orders(&db).await;
            let before = proxy.accepted();
            proxy.reset();
            eventually("both connections again", || async { (proxy.accepted() >= before + 2).then_some(()) }).await;
            api.until_connected().await;
        }
        until_more_orders(&db).await;
    })
    .await;
    shop.recover_and_stop().await;
}

/// Neither end closes the connection: only missing heartbeats and confirms reveal it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_half_open_broker_link_is_detected_and_replaced() {
    let db = TestDb::on_rabbit(Engine::Postgres).await;
    let (proxy, link) = proxy_to_broker(&db).await;
    let mut shop = Shop::open_through(&db, &link, &["--amqp-heartbeat", "1s"]).await;
    let api = shop.api();
    shop.place_during(async {
        until_more_orders(&db).await;
        proxy.go_half_open();
        until_broker_is(&api, "down").await;
        let before = proxy.accepted();
        eventually("an attempt to connect", || async { (proxy.accepted() > before).then_some(()) }).await;
        proxy.restore();
        api.until_connected().await;
        until_more_orders(&db).await;
    })
    .await;
    shop.recover_and_stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2, crate = "crate::support::schedule")]
async fn a_reset_of_the_postgres_links_costs_nothing() {
    let postgres = OwnPostgres::start();
    let db = TestDb::at(postgres.url());
    let proxy = Proxy::to(postgres.port()).await;
    let link = TestDb::at(proxy.url(&postgres.url()));
    let mut shop = Shop::open_through(&db, &link, &IMPATIENT).await;
    let api = shop.api();
    shop.place_during(async {
        for _ in 0..5 {
            until_more_orders(&db).await;
            let before = proxy.accepted();
            proxy.reset();
            eventually("a connection again", || async { (proxy.accepted() > before).then_some(()) }).await;
        }
        until_more_orders(&db).await;
        until_well(&api).await;
    })
    .await;
    shop.recover_and_stop().await;
}
