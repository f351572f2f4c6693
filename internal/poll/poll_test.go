// SPDX-License-Identifier: Apache-2.0

package poll

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

var (
	theKey   = desired.SignalKey{1, 2, 3}
	otherKey = desired.SignalKey{4, 5, 6}
	web      = Service{netip.MustParseAddr("2001:db8:80::1"), 80, 6}
	dns      = Service{netip.MustParseAddr("192.0.2.53"), 0, 17}
)

// answering returns a responder with the keys that knows the load of web.
func answering(t *testing.T, keys ...desired.SignalKey) *Responder {
	t.Helper()
	r := NewResponder(func(s Service) (Load, bool) { return Load{7, 64}, s == web })
	testhost.Must(t, r.Listen("[::1]:0"))
	t.Cleanup(func() { _ = r.Close() })
	r.SetKeys(keys)
	return r
}

// asking returns a poller with the keys.
func asking(t *testing.T, keys ...desired.SignalKey) *Poller {
	t.Helper()
	p := NewPoller()
	t.Cleanup(func() { _ = p.Close() })
	p.SetKeys(keys)
	return p
}

// ask returns a request of a poller.
func ask(t *testing.T, p *Poller, s Service) []byte {
	t.Helper()
	b, err := p.request(Target{ID: 3, Service: s})
	testhost.Must(t, err)
	return b
}

// A poller learns the load over a real socket.
func TestExchange(t *testing.T) {
	t.Parallel()
	r, p := answering(t, theKey), asking(t, theKey)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	target := Target{ID: 3, Address: netip.MustParseAddrPort(r.Address()), Service: web}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if a, ok := p.Answer(3); ok {
			if a.Load != (Load{7, 64}) {
				t.Errorf("load %v", a.Load)
			}
			break
		}
		if err := p.Ask(target); err != nil || time.Now().After(end) {
			t.Fatal("no answer", err)
		}
	}
	cancel()
	<-done
}

// The address of an agent that cannot listen is in the error.
func TestListen(t *testing.T) {
	t.Parallel()
	used := answering(t).Address()
	for address, problem := range map[string]string{
		used: "address already in use", "192.0.2.1:7460": "cannot assign requested address",
	} {
		err := NewResponder(nil).Listen(address)
		if err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("poll.listen %q: ", address)) ||
			!strings.Contains(err.Error(), problem) {
			t.Errorf("%v, want %s", err, problem)
		}
	}
}

// A node with two keys accepts messages of both. So keys can change without a refused message.
func TestKeys(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		balancer, agent desired.SignalKeys
		asked, told     bool
	}{
		{desired.SignalKeys{theKey}, desired.SignalKeys{theKey}, true, true},
		{desired.SignalKeys{otherKey}, desired.SignalKeys{theKey}, false, false},
		{desired.SignalKeys{theKey}, nil, false, false},
		{desired.SignalKeys{theKey}, desired.SignalKeys{otherKey, theKey}, true, false},
		{desired.SignalKeys{theKey, otherKey}, desired.SignalKeys{otherKey, theKey}, true, true},
	} {
		p, r := asking(t, c.balancer...), answering(t, c.agent...)
		answer := r.answer(ask(t, p, web))
		if asked := answer != nil; asked != c.asked {
			t.Errorf("%v: the agent answers: %t", c, asked)
		}
		p.take(answer, time.Now())
		if _, told := p.Answer(3); told != c.told {
			t.Errorf("%v: the balancer takes the answer: %t", c, told)
		}
	}
	if err := asking(t).Ask(Target{}); err == nil {
		t.Error("a poller without keys asks")
	}
}

// An answer counts once. It does not count after the next request, or for another service.
func TestReplays(t *testing.T) {
	t.Parallel()
	p, r := asking(t, theKey), answering(t, theKey)
	first := r.answer(ask(t, p, web))
	second := r.answer(ask(t, p, web))
	taken := func(b []byte) bool {
		before := p.Counts().Refused
		p.take(b, time.Now())
		return p.Counts().Refused == before
	}
	if taken(first) {
		t.Error("the answer to the request before is taken")
	}
	if !taken(second) || taken(second) {
		t.Error("an answer is not taken, or taken twice")
	}
	request := ask(t, p, web)
	if taken(request) {
		t.Error("a reflected request is taken for an answer")
	}
	if r.answer(r.answer(request)) != nil {
		t.Error("an answer is answered")
	}
	m, err := decode(request, desired.SignalKeys{theKey})
	testhost.Must(t, err)
	m.kind, m.service = known, dns
	if taken(m.encode(theKey)) {
		t.Error("the answer for another service is taken")
	}
	if p.Forget(3); taken(r.answer(request)) {
		t.Error("the answer of a forgotten server is taken")
	}
}

// An agent answers that it does not know the load. The poller keeps the last load.
func TestUnknownLoad(t *testing.T) {
	t.Parallel()
	p, r := asking(t, theKey), answering(t, theKey)
	p.take(r.answer(ask(t, p, web)), time.Now())
	p.take(r.answer(ask(t, p, dns)), time.Now())
	if a, ok := p.Answer(3); !ok || a.Load.Busy != 7 {
		t.Errorf("answer %v", a)
	}
	if p.Counts().Unknown != 1 || r.Counts().Unknown != 1 {
		t.Errorf("counts %v and %v", p.Counts(), r.Counts())
	}
}

// A request is refused if any of its bits is changed, or if it is shorter or longer.
func TestDamage(t *testing.T) {
	t.Parallel()
	r := answering(t, theKey)
	right := ask(t, asking(t, theKey), web)
	for n := range size {
		if r.answer(right[:n]) != nil {
			t.Errorf("%d bytes are answered", n)
		}
	}
	if r.answer(append(right[:size:size], 0)) != nil {
		t.Error("a longer request is answered")
	}
	for bit := range 8 * size {
		wrong := append([]byte(nil), right...)
		wrong[bit/8] ^= 1 << (bit % 8)
		if r.answer(wrong) != nil {
			t.Errorf("with another bit %d the request is answered", bit)
		}
	}
	right[4]++
	binary.LittleEndian.PutUint64(right[tagAt:], tag(right, theKey))
	if r.answer(right) != nil {
		t.Error("a request of another version is answered")
	}
}

// A message that was decoded stays the same when it is encoded and decoded again. An answer is not
// longer than its request.
func FuzzMessages(f *testing.F) {
	r := NewResponder(func(Service) (Load, bool) { return Load{1, 2}, true })
	r.SetKeys(desired.SignalKeys{theKey})
	m := message{kind: request, nonce: 1 << 60, service: dns}
	f.Add(m.encode(theKey), true)
	f.Add([]byte(nil), false)
	f.Fuzz(func(t *testing.T, b []byte, isTagged bool) {
		if isTagged && len(b) == size {
			binary.LittleEndian.PutUint64(b[tagAt:], tag(b, theKey))
		}
		if answer := r.answer(b); answer != nil && len(answer) > len(b) {
			t.Errorf("an answer of %d bytes to %d", len(answer), len(b))
		}
		m, err := decode(b, desired.SignalKeys{theKey})
		if err != nil {
			return
		}
		again, err := decode(m.encode(theKey), desired.SignalKeys{theKey})
		if err != nil || again != m {
			t.Errorf("%v, after a round trip %v: %v", m, again, err)
		}
	})
}
