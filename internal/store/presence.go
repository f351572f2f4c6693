// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// longestAbsence is the longest pause before a balancer tries again to be present.
const longestAbsence = time.Second

// Present keeps this balancer present in the store until the context ends: its newest value from
// own is there as long as the process lives. If the process dies or loses the store, etcd removes
// the value after the given number of seconds. At the context's end, Present removes it at once.
//
// Present calls heard with the values of all present balancers, by name, at first and after each
// change. If the store does not answer, it calls heard with nil and the reason, and tries again.
func (s *Store) Present(
	ctx context.Context, seconds int64, own <-chan string, heard func(map[string]string, error),
) {
	p := presence{s, seconds, own, heard, ""}
	select {
	case p.value = <-own:
	case <-ctx.Done():
		return
	}
	pause := firstPause
	for ctx.Err() == nil {
		began := time.Now()
		err := p.attend(ctx)
		if ctx.Err() != nil {
			return
		}
		heard(nil, err)
		if time.Since(began) > 2*longestAbsence {
			pause = firstPause
		}
		select {
		case <-ctx.Done():
		case <-time.After(jittered(pause)):
		}
		pause = min(2*pause, longestAbsence)
	}
}

// presence is a balancer that is present in the store.
type presence struct {
	*Store
	seconds int64
	own     <-chan string
	heard   func(map[string]string, error)
	value   string // the newest one from own
}

// attend keeps the balancer present until the context ends, or until an error occurs.
func (p *presence) attend(ctx context.Context) error {
	life, err := p.newLease(ctx, p.seconds)
	if err != nil {
		return err
	}
	defer func() {
		if ctx.Err() != nil {
			life.close()
		} else {
			life.leave() // after an error, the next attempt gives the key another lease
		}
	}()
	if err := p.write(ctx, life); err != nil {
		return err
	}
	first, err := p.get(ctx, p.key(presentKey), clientv3.WithPrefix())
	if err != nil {
		return err
	}
	all := map[string]string{}
	for _, kv := range first.Kvs {
		all[p.nameIn(kv.Key)] = string(kv.Value)
	}
	p.heard(maps.Clone(all), nil)
	watching, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	events := p.client.Watch(watching, p.key(presentKey),
		clientv3.WithPrefix(), clientv3.WithRev(first.Header.Revision+1))
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-life.ended:
			return fmt.Errorf("the store does not answer, and the lease of %d s is lost", p.seconds)
		case p.value = <-p.own:
			if err := p.write(ctx, life); err != nil {
				return err
			}
		case response, isOpen := <-events:
			switch {
			case !isOpen:
				return errors.New("the watch has ended")
			case response.Err() != nil:
				return response.Err()
			}
			p.take(all, response.Events)
			if _, isHere := all[p.name]; !isHere {
				return errors.New("somebody has removed the key of this balancer")
			}
			p.heard(maps.Clone(all), nil)
		}
	}
}

// write writes the value of this balancer.
func (p *presence) write(ctx context.Context, life *lease) error {
	put := clientv3.OpPut(p.key(keyOf(presentKey, p.name)), p.value, clientv3.WithLease(life.id))
	_, _, err := p.commit(ctx, nil, []clientv3.Op{put})
	return err
}

// take applies events to the values of all balancers.
func (p *presence) take(all map[string]string, events []*clientv3.Event) {
	for _, event := range events {
		name := p.nameIn(event.Kv.Key)
		if event.Type == clientv3.EventTypeDelete {
			delete(all, name)
		} else {
			all[name] = string(event.Kv.Value)
		}
	}
}

// nameIn returns the name of the balancer to which a key belongs, or an empty string.
func (p *presence) nameIn(key []byte) string {
	name, _, err := namesOf(presentKey, string(key[len(p.prefix):]))
	if err != nil {
		return ""
	}
	return name
}
