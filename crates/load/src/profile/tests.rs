use super::*;

fn packets(shape: &Shape, bursts: u64) -> Vec<Vec<usize>> {
    let burst = |number| {
        let mut sizes = Vec::new();
        shape.burst(Draw::new(1, 0, number), number, |size, count| sizes.extend(vec![size; count]));
        sizes
    };
    (0..bursts).map(burst).collect()
}

#[test]
fn built_in_profiles_match_their_documented_rates() {
    for (name, to_peer, to_client) in [
        // Packets per second and kbit/s of one client, to the peer and to the client.
        ("audio", (50.2, 48.0), (50.2, 48.0)),
        ("call", (248.6, 1_630.0), (248.6, 1_630.0)),
        ("sfu", (476.0, 3_300.0), (673.0, 3_900.0)),
        ("screen", (149.0, 1_040.0), (71.0, 64.0)),
        ("vpn", (475.1, 380.0), (925.1, 10_500.0)),
    ] {
        let profile = Profile::open(name).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(profile.name(), name);
        assert!(profile.longest() <= 1_452, "{name}");
        for (direction, (pps, kbps)) in [(Direction::ToPeer, to_peer), (Direction::ToClient, to_client)] {
            let of = |figure: fn(&ProfileStream) -> f64| {
                profile.per_flow(|stream| if stream.direction == direction { figure(stream) } else { 0.0 })
            };
            let found = of(|stream| stream.bursts_per_second * stream.shape.mean().packets);
            let found_kbps =
                of(|stream| stream.bursts_per_second * stream.shape.mean().bytes * 8.0 / 1_000.0);
            assert!((found / pps - 1.0).abs() < 0.1, "{name} {direction}: {found} packets a second");
            assert!((found_kbps / kbps - 1.0).abs() < 0.1, "{name} {direction}: {found_kbps} kbit/s");
        }
    }
}

#[test]
fn drawn_bursts_match_the_computed_mean() {
    let profile = Profile::open("sfu").expect("a built-in profile");
    let more = Profile::open("vpn").expect("a built-in profile");
    for stream in profile.streams.iter().chain(&more.streams) {
        let bursts = packets(&stream.shape, 6_000);
        let mean = stream.shape.mean();
        let count = bursts.iter().map(Vec::len).sum::<usize>() as f64 / 6_000.0;
        let bytes = bursts.iter().flatten().sum::<usize>() as f64 / 6_000.0;
        assert!((count / mean.packets - 1.0).abs() < 0.03, "{}: {count} of {}", stream.name, mean.packets);
        assert!((bytes / mean.bytes - 1.0).abs() < 0.03, "{}: {bytes} of {}", stream.name, mean.bytes);
    }
}

#[test]
fn frames_are_split_evenly_and_key_frames_follow_at_their_interval() {
    let key = KeyFrames { bytes: Range::just(10_000), every: 4 };
    let shape = Shape::Frame { bytes: Range::just(2_500), packet: 1_150, key: Some(key) };
    let frames = packets(&shape, 8);
    for (number, frame) in frames.iter().enumerate() {
        let (bytes, count) = if number % 4 == 0 { (10_000, 9) } else { (2_500, 3) };
        assert_eq!((frame.iter().sum::<usize>(), frame.len()), (bytes, count), "{frame:?}");
        let (least, most) = (frame.iter().min(), frame.iter().max());
        assert!(
            most.zip(least).is_some_and(|(most, least)| most - least <= 1 && *most <= 1_150),
            "{frame:?}"
        );
        assert!(frame.is_sorted_by(|a, b| a >= b), "{frame:?}");
    }
    let tiny = Shape::Frame { bytes: Range::just(1), packet: 1_150, key: None };
    assert_eq!(packets(&tiny, 1), [[HEADER_LEN]]);
}

#[test]
fn weights_set_the_frequency_of_sizes() {
    let sizes = vec![
        Sizes { range: Range::just(100), weights: 3 },
        Sizes { range: Range::new(200, 300), weights: 4 },
    ];
    let shape = Shape::Packets { count: Range::just(1), sizes };
    let drawn: Vec<usize> = packets(&shape, 10_000).concat();
    let small = drawn.iter().filter(|size| **size == 100).count();
    assert!((7_300..=7_700).contains(&small), "{small}");
    assert!(drawn.iter().all(|size| *size == 100 || (200..=300).contains(size)));
}

#[test]
fn an_unknown_profile_lists_the_built_in_ones() {
    let told = Profile::open("vioce").expect_err("there is no such profile").to_string();
    assert!(told.contains("vioce") && told.contains("audio, call, sfu, screen, vpn"), "{told}");
}
