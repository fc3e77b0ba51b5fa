//! Third-party authorization (RFC 7635), from the challenge to the end of the allocation.

use crate::common::*;
use proptest::prelude::*;
use stun_types::attribute::{AttributeStaticType as _, Realm as RealmAttribute, Username};
use turnpike_turn::{
    server::{Realm, TokenProblem},
    time::Now,
};

const ACCESS_TOKEN: u16 = 0x001B;
const THIRD_PARTY_AUTHORIZATION: u16 = 0x802E;
const NAME: &str = "turn.example.org";
const MAC_KEY: [u8; 20] = [5; 20];
const TENANT: &str = "tenant.example";

fn north() -> TokenKey {
    TokenKey::A256Gcm([1; 32])
}

fn south() -> TokenKey {
    TokenKey::A128Gcm([2; 16])
}

/// Keys `north` and `south` in the first realm, and another key `north` in the tenant's.
fn third_party() -> ServerConfig {
    let issuer = |kid: &str, key, realm: &str| IssuerKey {
        kid: kid.to_owned(),
        key,
        realm: realm.to_owned(),
        max_lifetime: 86_400,
    };
    ServerConfig {
        tenants: vec![Realm { name: TENANT.to_owned(), allow_sha256: true, username_anonymity: true }],
        third_party: ThirdParty {
            server_name: NAME.to_owned(),
            skew: 5,
            keys: vec![
                issuer("north", north(), REALM),
                issuer("south", south(), REALM),
                issuer("north", TokenKey::A256Gcm([3; 32]), TENANT),
            ],
        },
        ..config()
    }
}

#[derive(Clone)]
struct Holder {
    kid: &'static str,
    realm: String,
    nonce: String,
    token: Option<Vec<u8>>,
    mac_key: Vec<u8>,
    mac: Mac,
}

impl Holder {
    /// Token issued `age` seconds ago for `lifetime` seconds, and a fresh nonce.
    fn new(world: &mut World, age: u64, lifetime: u32) -> Self {
        let challenge = world.ask(&Ask::allocate());
        let mut holder = Self {
            kid: "north",
            realm: REALM.to_owned(),
            nonce: challenge.get::<Nonce>().nonce().to_owned(),
            token: None,
            mac_key: MAC_KEY.to_vec(),
            mac: Mac::Sha1,
        };
        holder.renew(world, &north(), age, lifetime);
        holder
    }

    fn renew(&mut self, world: &World, key: &TokenKey, age: u64, lifetime: u32) {
        let token = AccessToken::new(&self.mac_key, world.now.unix - age, lifetime).unwrap();
        self.token = Some(token.seal(key, NAME, [9; 12]));
    }

    fn without_token(&self) -> Self {
        Self { token: None, ..self.clone() }
    }

    fn bytes(&self, ask: Ask) -> Vec<u8> {
        let mut ask = ask
            .with(&Username::new(self.kid).unwrap())
            .with(&RealmAttribute::new(&self.realm).unwrap())
            .with(&Nonce::new(&self.nonce).unwrap());
        if let Some(token) = &self.token {
            ask = ask.raw(ACCESS_TOKEN, token);
        }
        signed(&ask.bytes(), &Key::from_bytes(&self.mac_key), self.mac, false)
    }

    fn ask(&self, world: &mut World, ask: Ask) -> Reply {
        match world.feed(&self.bytes(ask)) {
            Outcome::Reply(bytes) => Reply(bytes),
            Outcome::Open(request) => world.open(&request),
            other => panic!("{other:?}"),
        }
    }

    /// MESSAGE-INTEGRITY, as for any request without a password algorithm (RFC 7635 section 7).
    fn signed(&self, reply: &Reply) -> bool {
        reply.verifies(&Key::from_bytes(&self.mac_key), Mac::Sha1)
    }
}

#[test]
fn a_challenge_contains_the_server_name_if_tokens_are_accepted() {
    let offered = |config| {
        let challenge = World::with(config).ask(&Ask::allocate());
        assert!(challenge.code() == Some(401) && challenge.has(Nonce::TYPE));
        let message = challenge.message();
        let name = message.raw_attribute(AttributeType::new(THIRD_PARTY_AUTHORIZATION));
        name.map(|raw| String::from_utf8(raw.value.to_vec()).unwrap())
    };
    assert_eq!(offered(third_party()).as_deref(), Some(NAME));
    assert_eq!(offered(config()), None);
    let mut elsewhere = third_party();
    elsewhere.third_party.keys.retain(|key| key.realm == TENANT);
    assert_eq!(offered(elsewhere), None, "no key is valid in this realm");
}

#[test]
fn a_token_authenticates_and_its_key_signs_every_response() {
    for (mac_key, mac) in [(20, Mac::Sha1), (32, Mac::Sha256), (20, Mac::Sha256), (64, Mac::Sha1)] {
        let mut world = World::with(third_party());
        let mut holder = Holder::new(&mut world, 0, 3600);
        (holder.mac_key, holder.mac) = (vec![6; mac_key], mac);
        holder.renew(&world, &north(), 0, 3600);
        let reply = holder.ask(&mut world, Ask::allocate()).success();
        assert!(holder.signed(&reply));
        assert_eq!(reply.lifetime(), 600);
        assert!(matches!(&world.effects()[..], [Effect::Opened { username, .. }] if &**username == "north"));
        // RFC 7635 section 9: ACCESS-TOKEN occurs only in Allocate and Refresh requests.
        let bare = holder.without_token();
        for ask in [Ask::permit(PEER), Ask::bind(0x4000, PEER)] {
            assert!(bare.signed(&bare.ask(&mut world, ask).success()));
        }
        assert!(holder.signed(&holder.ask(&mut world, Ask::refresh(600)).success()));
        holder.ask(&mut world, Ask::refresh(0)).success();
        assert_eq!(world.server.allocations(), 0);
        assert_eq!(world.server.policy_mut().held(), 0);
        assert_eq!(world.server.policy_mut().lookups.get(), 0, "no password lookup");
    }
}

#[test]
fn coturn_clients_may_sign_with_part_of_the_key() {
    let mut world = World::with(third_party());
    let whole = Holder::new(&mut world, 0, 600);
    let holder = Holder { mac_key: MAC_KEY[..16].to_vec(), ..whole.clone() };
    assert!(holder.signed(&holder.ask(&mut world, Ask::allocate()).success()));
    holder.without_token().ask(&mut world, Ask::permit(PEER)).success();
    for (length, mac) in [(15, Mac::Sha1), (16, Mac::Sha256), (19, Mac::Sha1)] {
        let other = Holder { mac_key: MAC_KEY[..length].to_vec(), mac, ..whole.clone() };
        assert_eq!(other.ask(&mut world, Ask::refresh(600)).code(), Some(401), "{length} {mac:?}");
    }
}

#[test]
fn a_refused_token_is_401_and_logged_with_a_reason() {
    let broken = |change: fn(&mut Vec<u8>)| {
        move |_: &World, holder: &mut Holder| change(holder.token.as_mut().expect("a token"))
    };
    type Change = Box<dyn Fn(&World, &mut Holder)>;
    let cases: Vec<(Change, CredentialRefusal)> = vec![
        (Box::new(|_, it| it.kid = "east"), CredentialRefusal::Token(TokenProblem::UnknownKey)),
        (Box::new(|_, it| it.kid = "south"), CredentialRefusal::Token(TokenProblem::NotAuthentic)),
        (Box::new(broken(Vec::clear)), CredentialRefusal::Token(TokenProblem::Malformed)),
        (Box::new(broken(|token| token.truncate(30))), CredentialRefusal::Token(TokenProblem::Malformed)),
        (Box::new(broken(|token| token.resize(763, 0))), CredentialRefusal::Token(TokenProblem::Malformed)),
        (Box::new(broken(|token| token[20] ^= 1)), CredentialRefusal::Token(TokenProblem::NotAuthentic)),
        (
            Box::new(|world, it| {
                let token = AccessToken::new(&it.mac_key, world.now.unix, 60).unwrap();
                it.token = Some(token.seal(&north(), "turn.example.com", [9; 12]));
            }),
            CredentialRefusal::Token(TokenProblem::NotAuthentic),
        ),
        (
            Box::new(|world, it| {
                let token = AccessToken::new(&it.mac_key, world.now.unix + 6, 60).unwrap();
                it.token = Some(token.seal(&north(), NAME, [9; 12]));
            }),
            CredentialRefusal::Token(TokenProblem::Future { ahead: 6 }),
        ),
        (
            Box::new(|world, it| {
                let token = AccessToken::new(&it.mac_key, (1 << 48) - 1, u32::MAX).unwrap();
                it.token = Some(token.seal(&north(), NAME, [9; 12]));
                assert!(world.now.unix < 1 << 32);
            }),
            CredentialRefusal::Token(TokenProblem::Future { ahead: (1 << 48) - 1 - 1_800_000_000 }),
        ),
        (Box::new(|world, it| it.renew(world, &north(), 65, 60)), CredentialRefusal::Expired { ago: 5 }),
        (Box::new(|world, it| it.renew(world, &north(), 10, 0)), CredentialRefusal::Expired { ago: 10 }),
        (Box::new(|_, it| it.mac_key = vec![6; 20]), CredentialRefusal::WrongKey),
    ];
    for (change, why) in cases {
        let mut world = World::with(third_party());
        let mut holder = Holder::new(&mut world, 0, 60);
        change(&world, &mut holder);
        let reply = holder.ask(&mut world, Ask::allocate());
        assert_eq!(reply.code(), Some(401), "{why:?}");
        assert!(reply.has(AttributeType::new(THIRD_PARTY_AUTHORIZATION)) && !holder.signed(&reply));
        assert_eq!(world.refusals(), [why]);
        assert_eq!(world.server.allocations(), 0);
    }
}

#[test]
fn a_token_is_valid_until_its_expiry_plus_the_skew() {
    for (age, lifetime, left) in [(0, 60, Some(60)), (59, 60, Some(2)), (64, 60, Some(2)), (65, 60, None)] {
        let mut world = World::with(third_party());
        let holder = Holder::new(&mut world, age, lifetime);
        let reply = holder.ask(&mut world, Ask::allocate());
        assert_eq!(reply.is_success().then(|| reply.lifetime()), left, "{age}");
    }
    let mut world = World::with(third_party());
    let mut holder = Holder::new(&mut world, 0, 60);
    let ahead = AccessToken::new(&holder.mac_key, world.now.unix + 5, 60).unwrap();
    holder.token = Some(ahead.seal(&north(), NAME, [9; 12]));
    assert_eq!(
        holder.ask(&mut world, Ask::allocate()).success().lifetime(),
        60,
        "limited to the token's lifetime"
    );
}

#[test]
fn a_key_limits_the_lifetime_of_its_tokens() {
    let mut config = third_party();
    config.third_party.keys[0].max_lifetime = 100;
    let mut world = World::with(config);
    let holder = Holder::new(&mut world, 40, u32::MAX);
    assert_eq!(holder.ask(&mut world, Ask::allocate()).success().lifetime(), 60);
    world.sleep(70);
    let reply = holder.ask(&mut world, Ask::allocate());
    assert_eq!(reply.code(), Some(401));
    assert!(world.refusals().contains(&CredentialRefusal::Expired { ago: 10 }));
}

#[test]
fn an_allocation_ends_with_its_token_unless_renewed() {
    let mut world = World::with(third_party());
    let mut holder = Holder::new(&mut world, 0, 100);
    assert_eq!(holder.ask(&mut world, Ask::allocate()).success().lifetime(), 100);
    world.sleep(60);
    // If the request has no token, the old one applies; a newer token under another key replaces it.
    assert_eq!(holder.without_token().ask(&mut world, Ask::refresh(600)).success().lifetime(), 40);
    holder.kid = "south";
    holder.mac_key = vec![7; 20];
    holder.renew(&world, &south(), 0, 300);
    assert_eq!(holder.ask(&mut world, Ask::refresh(600)).success().lifetime(), 300);
    holder.without_token().ask(&mut world, Ask::permit(PEER)).success();
    // An expired token is refused and does not end the allocation (RFC 7635 section 9).
    let mut late = holder.clone();
    late.renew(&world, &south(), 400, 300);
    assert_eq!(late.ask(&mut world, Ask::refresh(600)).code(), Some(401));
    world.effects();
    world.sleep(299);
    assert_eq!(world.server.allocations(), 1);
    world.sleep(1);
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(world.server.policy_mut().held(), 0);
    assert!(matches!(world.effects()[..], [Effect::Closed { reason: ClosedReason::Expired, .. }]));
}

#[test]
fn a_request_without_a_token_needs_its_allocations_5_tuple_and_key() {
    let mut world = World::with(third_party());
    let holder = Holder::new(&mut world, 0, 600);
    holder.ask(&mut world, Ask::allocate()).success();
    world.client.address.set_port(1);
    let mut elsewhere = Holder::new(&mut world, 0, 600).without_token();
    assert_eq!(elsewhere.ask(&mut world, Ask::permit(PEER)).code(), Some(401));
    world.client.address.set_port(40_000);
    elsewhere.nonce.clone_from(&holder.nonce);
    elsewhere.mac_key = vec![6; 20];
    assert_eq!(elsewhere.ask(&mut world, Ask::permit(PEER)).code(), Some(401));
    assert!(world.refusals().contains(&CredentialRefusal::WrongKey));
}

fn workers(count: u16) -> Vec<World> {
    World::workers(&ServerConfig { listeners: streams().listeners, ..third_party() }, count)
}

fn elsewhere(world: &mut World, holder: &Holder, client: Client) -> Holder {
    world.client = client;
    let challenge = world.ask(&Ask::allocate());
    Holder { nonce: challenge.get::<Nonce>().nonce().to_owned(), ..holder.clone() }
}

#[test]
fn a_mobile_client_needs_its_token_only_for_refresh() {
    let [mut world] = workers(1).try_into().ok().unwrap();
    let holder = Holder::new(&mut world, 0, 600);
    let reply = holder.ask(&mut world, Ask::allocate().raw(TICKET, &[])).success();
    let ticket = reply.ticket().unwrap();
    let there = elsewhere(&mut world, &holder, client(1));
    there.ask(&mut world, Ask::present(&ticket)).success();
    // No data has come from the new address yet.
    let bare = there.without_token();
    for ask in [Ask::permit(PEER), Ask::bind(0x4000, PEER), Ask::refresh(600)] {
        assert!(bare.signed(&bare.ask(&mut world, ask).success()));
    }
    let wrong = Holder { mac_key: vec![6; 20], ..bare };
    assert_eq!(wrong.ask(&mut world, Ask::permit(PEER)).code(), Some(401));
    assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
}

#[test]
fn a_request_without_a_token_is_answered_by_its_worker() {
    let mut workers = workers(2);
    let [owner, here] = &mut workers[..] else { panic!() };
    let holder = Holder::new(owner, 0, 600);
    let reply = holder.ask(owner, Ask::allocate().raw(TICKET, &[])).success();
    let there = elsewhere(here, &holder, client(1));
    let present = there.bytes(Ask::present(&reply.ticket().unwrap()));
    assert_eq!(here.feed(&present), Outcome::Forward { worker: 0, occupied: false });
    let (_, pending_move) = owner.forwarded(1, client(1), &present);
    here.server.expect(pending_move.expect("a pending move"));

    // Neither an unknown nonce nor a user with a password triggers a request to the owner.
    let bare = there.without_token();
    let stranger = Holder { nonce: "obMatJos2wAAAAAAAAAAAAAAAAAA".to_owned(), ..bare.clone() };
    assert_eq!(stranger.ask(here, Ask::permit(PEER)).code(), Some(438));
    let user = Holder { kid: "alice", ..bare.clone() };
    assert_eq!(user.ask(here, Ask::permit(PEER)).code(), Some(401));
    let permit = bare.bytes(Ask::permit(PEER));
    assert_eq!(here.feed(&permit), Outcome::Forward { worker: 0, occupied: false });
    let (outcome, _) = owner.forwarded(1, client(1), &permit);
    assert!(outcome.reply().is_success());
    assert_eq!((owner.server.allocations(), here.server.allocations()), (1, 0));
}

#[test]
fn a_connection_is_bound_with_the_token_of_its_allocation() {
    let mut workers = workers(2);
    let [owner, here] = &mut workers[..] else { panic!() };
    owner.client = stream(1);
    let holder = Holder::new(owner, 0, 600);
    holder.ask(owner, Ask::allocate_tcp()).success();
    let connect = |owner: &mut World, peer: &str| {
        owner.client = stream(1);
        let Outcome::Connect(request) = owner.feed(&holder.without_token().bytes(Ask::connect(peer))) else {
            panic!()
        };
        owner.connect_result(&request, Ok(())).success();
        request.connection
    };
    let connection = connect(owner, PEER);
    let wrong = Holder { mac_key: vec![6; 20], ..elsewhere(owner, &holder, stream(2)).without_token() };
    assert_eq!(wrong.ask(owner, Ask::connection_bind(connection)).code(), Some(401));
    let bare = elsewhere(owner, &holder, stream(3)).without_token();
    let bind = bare.bytes(Ask::connection_bind(connection));
    assert!(matches!(owner.feed(&bind), Outcome::Bind { connection: bound, .. } if bound == connection));
    assert_eq!(bare.ask(owner, Ask::connection_bind(connection)).code(), Some(400), "once");

    // On another worker, the stream is passed to the owner before authentication, but only with a valid
    // nonce.
    let connection = connect(owner, "198.41.0.4:7001");
    let bare = elsewhere(here, &holder, stream(4)).without_token();
    let user = Holder { kid: "alice", ..bare.clone() };
    assert_eq!(user.ask(here, Ask::connection_bind(connection)).code(), Some(401));
    let forged = Holder { nonce: "obMatJos2wAAAAAAAAAAAAAAAAAAA".to_owned(), ..bare.clone() };
    assert_eq!(forged.ask(here, Ask::connection_bind(connection)).code(), Some(438));
    let bind = bare.bytes(Ask::connection_bind(connection));
    assert_eq!(here.feed(&bind), Outcome::HandOver { worker: 0 });
    let verdict = owner.handed_over(stream(4), &bind);
    assert!(matches!(verdict, Outcome::Bind { connection: bound, .. } if bound == connection));
    // Datagrams have no connection that could be passed on, and control connections stay where they are.
    let datagram = elsewhere(here, &holder, client(5)).without_token();
    assert_eq!(datagram.ask(here, Ask::connection_bind(connection)).code(), Some(401));
    let control = elsewhere(here, &holder, stream(6));
    control.ask(here, Ask::allocate()).success();
    assert_eq!(control.without_token().ask(here, Ask::connection_bind(connection)).code(), Some(401));
}

#[test]
fn a_token_is_valid_only_in_the_realm_of_its_key() {
    let mut world = World::with(third_party());
    let mut holder = Holder::new(&mut world, 0, 600);
    holder.realm = TENANT.to_owned();
    let stale = holder.ask(&mut world, Ask::allocate());
    assert_eq!(stale.code(), Some(438));
    holder.nonce = stale.get::<Nonce>().nonce().to_owned();
    assert_eq!(holder.ask(&mut world, Ask::allocate()).code(), Some(401));
    holder.kid = "south";
    holder.renew(&world, &south(), 0, 600);
    assert_eq!(holder.ask(&mut world, Ask::allocate()).code(), Some(401));
    let token = |problem| CredentialRefusal::Token(problem);
    assert_eq!(world.refusals(), [token(TokenProblem::NotAuthentic), token(TokenProblem::UnknownKey)]);
}

#[test]
fn users_with_passwords_coexist_with_tokens() {
    for scheme in [Scheme::Md5, Scheme::Sha256, Scheme::Userhash] {
        let mut world = World::with(third_party());
        let alice = world.credentials("alice", scheme);
        let reply = world.ask(&Ask::allocate().signed(&alice)).success();
        assert!(reply.is_signed(&alice));
        let holder = Holder::new(&mut world, 0, 600);
        assert_eq!(holder.ask(&mut world, Ask::permit(PEER)).code(), Some(441));
    }
}

#[test]
fn access_token_is_unknown_where_tokens_are_not_accepted() {
    let mut world = World::with(config());
    let reply = world.ask_as("alice", Ask::allocate().raw(ACCESS_TOKEN, &[0; 60]));
    assert_eq!(reply.code(), Some(420));
    assert!(reply.get::<UnknownAttributes>().has_attribute(AttributeType::new(ACCESS_TOKEN)));
    let holder = Holder::new(&mut world, 0, 600);
    assert_eq!(holder.ask(&mut world, Ask::allocate()).code(), Some(401));
    assert_eq!(world.refusals(), [CredentialRefusal::NoSuchUser]);
}

#[test]
fn other_unknown_attributes_with_a_token_are_refused() {
    let mut world = World::with(third_party());
    let holder = Holder::new(&mut world, 0, 600);
    let reply = holder.ask(&mut world, Ask::allocate().raw(0x7FFF, b"x"));
    assert_eq!(reply.code(), Some(420));
    let unknown = reply.get::<UnknownAttributes>();
    assert!(unknown.has_attribute(AttributeType::new(0x7FFF)));
    assert!(!unknown.has_attribute(AttributeType::new(ACCESS_TOKEN)));
}

#[test]
fn a_stale_nonce_is_438_and_an_invalid_one_costs_no_decryption() {
    let mut world = World::with(third_party());
    let mut holder = Holder::new(&mut world, 0, 86_400);
    world.sleep(3601);
    let stale = holder.ask(&mut world, Ask::allocate());
    assert_eq!(stale.code(), Some(438));
    assert!(stale.has(AttributeType::new(THIRD_PARTY_AUTHORIZATION)));
    "obMatJos2wAAAAAAAAAAAAAAAAAAA".clone_into(&mut holder.nonce);
    holder.token = Some(vec![0; 60]);
    assert_eq!(holder.ask(&mut world, Ask::allocate()).code(), Some(438));
    assert_eq!(world.refusals(), [], "an invalid token is not decrypted");
}

#[test]
fn quotas_apply_per_token() {
    let policy = TestPolicy { per_user: 2, total: 10, ..TestPolicy::default() };
    let mut world = World::with_policy(third_party(), policy);
    for (port, mac_key, code) in [(1, 5, None), (2, 5, None), (3, 5, Some(486)), (4, 6, None)] {
        world.client = client(port);
        let mut holder = Holder::new(&mut world, 0, 600);
        holder.mac_key = vec![mac_key; 20];
        holder.renew(&world, &north(), 0, 600);
        assert_eq!(holder.ask(&mut world, Ask::allocate()).code(), code, "{port}");
    }
    let names: Vec<_> = world.server.policy_mut().held.borrow().keys().cloned().collect();
    assert_eq!(names.len(), 2);
    assert!(names.iter().all(|name| name.starts_with("north/") && name.len() == 6 + 16), "{names:?}");
}

#[test]
fn removing_a_token_key_keeps_allocations_and_refuses_new_ones() {
    let mut world = World::with(third_party());
    let holder = Holder::new(&mut world, 0, 600);
    holder.ask(&mut world, Ask::allocate()).success();
    let mut without = third_party();
    without.third_party.keys.retain(|key| key.kid != "north" || key.realm != REALM);
    for config in [without, config()] {
        world.server.reconfigure(world.now, Arc::new(config));
        assert_eq!(holder.ask(&mut world, Ask::refresh(600)).code(), Some(401));
        holder.without_token().ask(&mut world, Ask::permit(PEER)).success();
    }
    assert_eq!(world.server.allocations(), 1);
}

#[test]
fn no_truncated_request_with_a_token_is_accepted() {
    let mut world = World::with(third_party());
    let holder = Holder::new(&mut world, 0, 600);
    let bytes = holder.bytes(Ask::allocate());
    for length in 0..bytes.len() {
        let mut cut = bytes[..length].to_vec();
        if length >= 20 {
            // The length field matches the truncated message, rounded down to a multiple of four.
            let claimed = u16::try_from((length - 20) & !3).unwrap();
            cut[2..4].copy_from_slice(&claimed.to_be_bytes());
            cut.truncate(20 + usize::from(claimed));
        }
        match world.feed(&cut) {
            Outcome::Drop(_) => {}
            Outcome::Reply(reply) => assert!(!Reply(reply).is_success()),
            other => panic!("{length}: {other:?}"),
        }
    }
    assert_eq!(world.server.allocations(), 0);
    assert!(Holder::new(&mut world, 0, 600).ask(&mut world, Ask::allocate()).is_success());
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Sleep(u64),
    Allocate((u64, u32)),
    Refresh(Option<(u64, u32)>, u32),
    Permit,
    Upgrade,
}

fn step() -> impl Strategy<Value = Step> {
    let token = || (0_u64..100, prop_oneof![0_u32..200, 200_u32..4000]);
    let seconds = prop_oneof![1 => Just(0), 9 => 1_u32..5000];
    prop_oneof![
        3 => (1_u64..700).prop_map(Step::Sleep),
        2 => (1_u64..8).prop_map(Step::Sleep),
        3 => token().prop_map(Step::Allocate),
        4 => (prop::option::of(token()), seconds).prop_map(|(token, seconds)| Step::Refresh(token, seconds)),
        1 => Just(Step::Permit),
        1 => Just(Step::Upgrade),
    ]
}

fn upgraded(mut from: World) -> World {
    let mut to = World::with(lasting());
    to.now = Now { ms: 5000, unix: from.now.unix };
    (to.client, to.ports) = (from.client, from.ports);
    for allocation in from.server.portable(|_| true) {
        let moved = from.server.snapshot(from.now, allocation).expect("an open allocation");
        let text = serde_json::to_string(&moved).unwrap();
        let moved: Moved = serde_json::from_str(&text).unwrap();
        from.server.surrender(from.now, allocation);
        assert!(to.server.restore(to.now, moved, Link(0)).is_ok(), "below all quotas");
    }
    to
}

fn lasting() -> ServerConfig {
    ServerConfig { nonce_lifetime: 1_000_000, ..third_party() }
}

/// Expected state of a client: when its last token and its allocation expire, in Unix seconds.
#[derive(Clone, Copy, Debug)]
struct Believed {
    token: u64,
    allocation: u64,
}

const SKEW_S: u64 = 5;

fn end_of((age, lifetime): (u64, u32), now: u64) -> Option<u64> {
    let end = now - age + u64::from(lifetime);
    (now < end + SKEW_S).then_some(end)
}

fn granted(asked: u32, token: u64, now: u64) -> u64 {
    let asked = u64::from(asked).clamp(600, 3600);
    asked.min(token.saturating_sub(now).max(1))
}

type Answered = Result<u64, u16>;

impl Believed {
    fn after(before: Option<Self>, step: Step, now: u64) -> (Answered, Option<Self>) {
        match (step, before) {
            (Step::Sleep(_) | Step::Upgrade, _) => (Ok(0), before),
            (Step::Allocate(token), _) => match (end_of(token, now), before) {
                (None, _) => (Err(401), before),
                (Some(_), Some(_)) => (Err(437), before),
                (Some(token), None) => {
                    let seconds = granted(600, token, now);
                    (Ok(seconds), Some(Self { token, allocation: now + seconds }))
                }
            },
            (Step::Refresh(shown, asked), _) => {
                // If the request has no token, the last one applies, unless the allocation has ended.
                let end = match (shown, before) {
                    (Some(token), _) => end_of(token, now),
                    (None, Some(it)) => (now < it.token + SKEW_S).then_some(it.token),
                    (None, None) => None,
                };
                match (end, before) {
                    (None, _) => (Err(401), before),
                    (Some(_), None) => (Err(437), None),
                    (Some(_), Some(_)) if asked == 0 => (Ok(0), None),
                    (Some(token), Some(_)) => {
                        let seconds = granted(asked, token, now);
                        (Ok(seconds), Some(Self { token, allocation: now + seconds }))
                    }
                }
            }
            (Step::Permit, Some(it)) if now < it.token + SKEW_S => (Ok(0), before),
            (Step::Permit, _) => (Err(401), before),
        }
    }
}

proptest! {
    #![proptest_config(crate::kept_seeds())]

    /// No allocation outlasts its last token, whichever process it is in.
    #[test]
    fn an_allocation_lasts_as_long_as_its_tokens(steps in prop::collection::vec(step(), 1..40)) {
        let mut world = World::with(lasting());
        let mut holder = Holder::new(&mut world, 0, 600);
        let mut believed: Option<Believed> = None;
        for step in steps {
            let (expected, after) = Believed::after(believed, step, world.now.unix);
            believed = after;
            let mut show = |world: &World, token: Option<(u64, u32)>| {
                holder.token = None;
                if let Some((age, lifetime)) = token {
                    holder.renew(world, &north(), age, lifetime);
                }
                holder.clone()
            };
            let ask = match step {
                Step::Sleep(seconds) => {
                    world.sleep(seconds);
                    None
                }
                Step::Upgrade => {
                    world = upgraded(world);
                    None
                }
                Step::Allocate(token) => Some((show(&world, Some(token)), Ask::allocate())),
                Step::Refresh(token, seconds) => Some((show(&world, token), Ask::refresh(seconds))),
                Step::Permit => Some((show(&world, None), Ask::permit(PEER))),
            };
            if let Some((holder, ask)) = ask {
                let reply = holder.ask(&mut world, ask);
                let has_lifetime = !matches!(step, Step::Permit);
                let answered: Answered = match reply.code() {
                    Some(code) => Err(code),
                    None if has_lifetime => Ok(reply.lifetime().into()),
                    None => Ok(0),
                };
                let told = expected.map(|seconds| if seconds == 0 { 0 } else { seconds.max(2) });
                prop_assert_eq!(answered, told, "{:?}", step);
                prop_assert_eq!(holder.signed(&reply), !matches!(expected, Err(401)), "{:?}", step);
            }
            believed = believed.filter(|it| world.now.unix < it.allocation);
            let there = usize::from(believed.is_some());
            prop_assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (there, there), "{:?}", step);
        }
    }
}
