// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"encoding/binary"
	"fmt"
	"math"
)

// StateSize is the number of bytes of a saved state.
const StateSize = 4 + 4*stateNumbers

const (
	// stateVersion changes with the layout or the meaning of a state.
	stateVersion = 3
	// stateNumbers is the number of the numbers in a state. Capacities have the most: two numbers
	// for each number of flows from 1 to MostServed, three others, and four of beliefs.
	stateNumbers = 2*MostServed + 7
)

// Saved is what was learned of a server: byte 0 is the version, byte 1 tells what was learned, and
// bytes 2 and 3 are 0. Then there are floating-point numbers of 32 bits, little-endian.
type Saved [StateSize]byte

// contents returns byte 1 of a state: 1 for capacities, 2 to 6 for speeds, and 0 for beliefs alone.
func (e *Estimator) contents() byte {
	switch {
	case e.capacities != nil:
		return 1
	case e.settings.Kind == HLB:
		return 5
	case e.settings.Kind == HLBFixed:
		return 6
	case e.speeds != nil && e.speeds.options.FixedNoise:
		return 4
	case e.speeds != nil && e.speeds.options.Norm == ByMean:
		return 3
	case e.speeds != nil:
		return 2
	}
	return 0
}

// Save returns what was learned of a server. The state of LeastQueue and SED has beliefs only.
func (e *Estimator) Save(server int) (state Saved) {
	s := &e.servers[server]
	numbers := []float64{s.answers.half, s.answers.ill, s.endings.half, s.endings.ill}
	switch {
	case e.capacities != nil:
		numbers = e.capacities.servers[server].save(numbers)
	case e.speeds != nil:
		numbers = e.speeds.save(server, numbers)
	}
	state[0], state[1] = stateVersion, e.contents()
	for i, x := range numbers {
		binary.LittleEndian.PutUint32(state[4+4*i:], math.Float32bits(float32(x)))
	}
	return state
}

// Restore brings back what was saved an age in seconds ago. Older observations count less. The
// server has no slow start. Restore fails, and changes nothing, if the state is of another version
// or kind, or is damaged.
func (e *Estimator) Restore(server int, state []byte, age float64) error {
	numbers, err := e.decode(state)
	if err != nil {
		return err
	}
	if !(age >= 0) {
		return fmt.Errorf("age %v: must be 0 s or more", age)
	}
	s := &e.servers[server]
	s.age = math.Inf(1)
	for i, b := range [...]*belief{&s.answers.belief, &s.endings.belief} {
		*b = belief{half: min(1, numbers[2*i])}
		b.ill = min(1-b.half, numbers[2*i+1])
		b.age(age)
	}
	if s.isSuspect = s.suspicion() > 1; s.isSuspect {
		s.aftermath = e.settings.Silent
	}
	switch {
	case e.capacities != nil:
		l := &e.capacities.servers[server]
		l.restore(numbers[4:])
		l.fade(math.Exp(-age / memory))
	case e.speeds != nil:
		e.speeds.restore(server, numbers[4:], math.Exp(-age/memory))
	}
	e.setPrice(server)
	return nil
}

// decode returns the numbers of a state. It returns an error if the state is of another version or
// kind, or contains an invalid number.
func (e *Estimator) decode(state []byte) (numbers [stateNumbers]float64, err error) {
	switch {
	case len(state) != StateSize:
		return numbers, fmt.Errorf("state of %d bytes: must have %d", len(state), StateSize)
	case state[0] != stateVersion:
		return numbers, fmt.Errorf("state of version %d: must be %d", state[0], stateVersion)
	case state[1] != e.contents():
		return numbers, fmt.Errorf("state of another kind than %s", e.settings.Kind)
	}
	for i := range numbers {
		x := float64(math.Float32frombits(binary.LittleEndian.Uint32(state[4+4*i:])))
		if !(x >= 0) || math.IsInf(x, 1) {
			return numbers, fmt.Errorf("state with the number %v: must be 0 or more", x)
		}
		numbers[i] = x
	}
	return numbers, nil
}

// save appends what was learned of a server.
func (l *learned) save(numbers []float64) []float64 {
	numbers = append(numbers, l.capacity, l.wait, l.stays)
	for _, had := range l.having[1:] {
		numbers = append(numbers, had.seconds, had.ends)
	}
	return numbers
}

// restore is the reverse of save.
func (l *learned) restore(numbers []float64) {
	*l = learned{capacity: max(1, numbers[0]), wait: numbers[1]}
	l.stays = numbers[2]
	for i := range l.having[1:] {
		had := tenure{seconds: numbers[3+2*i], ends: numbers[4+2*i]}
		l.having[1+i] = had
		l.ends += had.ends
	}
}

// save appends what was learned of a server. The noise is the same in the states of all servers.
func (s *Speeds) save(server int, numbers []float64) []float64 {
	v := &s.servers[server]
	relative, unit := v.weight*float64(len(s.servers)), s.unit()
	return append(numbers, v.filter.Value/unit, v.filter.Error/unit/unit, relative, s.noise/unit/unit)
}

// unit returns the z (speed.measured) of a server whose mean duration is the average. A state has
// multiples of this unit, because a service can have another number of servers after a restart.
func (s *Speeds) unit() float64 {
	if s.options.Norm == BySum {
		return 1 / float64(len(s.servers))
	}
	return 1
}

// restore restores an estimate. factor is 1 for a new one, and falls to 0 with its age. With 0, its
// error is the initial one.
func (s *Speeds) restore(server int, numbers []float64, factor float64) {
	v, unit := &s.servers[server], s.unit()
	v.filter.Value = numbers[0] * unit
	v.filter.Error = factor*min(numbers[1]*unit*unit, initialError) + (1-factor)*initialError
	if numbers[2] > 0 {
		v.weight = numbers[2] / float64(len(s.servers))
	}
	if !s.options.FixedNoise {
		s.noise = numbers[3] * unit * unit
	}
}
