// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"os"

	"go.yaml.in/yaml/v4"
)

// LoadBalancer reads a balancer's configuration file. The result has all defaults and obeys all
// rules. The error is of type Errors, or that of reading the file.
func LoadBalancer(path string) (*Balancer, error) {
	return Load(path, ParseBalancer)
}

// LoadAgent reads an agent's configuration file, as LoadBalancer a balancer's.
func LoadAgent(path string) (*Agent, error) {
	return Load(path, ParseAgent)
}

// Load reads a file and parses its content by a function. It adds the file name to the errors of
// the function, and to the warnings of its result.
func Load[T any](path string, parse func([]byte) (T, error)) (config T, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return config, err
	}
	config, err = parse(data)
	var problems Errors
	if errors.As(err, &problems) {
		return config, problems.In(path)
	}
	if warned, ok := any(config).(interface{ Warnings() Errors }); ok && err == nil {
		warned.Warnings().In(path)
	}
	return config, err
}

// ParseBalancer is LoadBalancer for a file's content.
func ParseBalancer(data []byte) (*Balancer, error) {
	var b Balancer
	d := decode(data, &b)
	b.setDefaults(d)
	d.checkBalancer(&b)
	if err := d.problems.orNil(); err != nil {
		return nil, err
	}
	d.warnOfBalancer(&b)
	b.warnings = d.warnings.sorted()
	return &b, nil
}

// ParseAgent is LoadAgent for a file's content.
func ParseAgent(data []byte) (*Agent, error) {
	var a Agent
	d := decode(data, &a)
	a.setDefaults(d)
	d.checkAgent(&a)
	if err := d.problems.orNil(); err != nil {
		return nil, err
	}
	d.warnOfAgent(&a)
	a.warnings = d.warnings.sorted()
	return &a, nil
}

// HasServers tells whether a service in the file lists servers. Every valid file of a balancer
// does, and no valid file of an agent. The error is of type Errors: the file is not a YAML
// document.
func HasServers(data []byte) (bool, error) {
	root, problem := parse(data)
	if problem != nil {
		return false, Errors{problem}
	}
	var file struct {
		Services []struct {
			Servers []any `yaml:"servers"`
		} `yaml:"services"`
	}
	// An invalid file is read as far as possible. ParseBalancer and ParseAgent report its errors.
	_ = root.Load(&file, yaml.WithUniqueKeys(false))
	for _, service := range file.Services {
		if len(service.Servers) > 0 {
			return true, nil
		}
	}
	return false, nil
}
